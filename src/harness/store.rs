//! The paths of record files, reading them, and atomic writes.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use tempfile::PersistError;

use super::manifest::restoring;
use super::partial::partial;
use super::problem::{Measured, Problem};
use super::record::{Outcome, Profile, RecordFile};
use super::subject::Subject;
use super::target::{HeldFolder, Target, descriptor, open_descriptor, open_device, open_in_place};
use crate::printable::shown_path;
use crate::root::{open, read_text};

/// The tree that a command works on: a checkout, or an unpacked bundle.
#[derive(Debug, Clone)]
pub struct Layout {
    pub root: PathBuf,
    /// Whose records and report these are; ours without one.
    pub subject: Option<Subject>,
}

impl Layout {
    /// The tree that [`crate::root::find`] finds.
    pub fn find() -> Result<Self> {
        Ok(Self::at(crate::root::find()?))
    }

    pub fn at(root: PathBuf) -> Self {
        Self { root, subject: None }
    }

    /// The folder of records and reports: `report`, and below it `subjects/<name>-<hash>` of a subject.
    pub fn report(&self) -> PathBuf {
        let report = self.root.join("report");
        self.subject.as_ref().map_or(report.clone(), |subject| report.join("subjects").join(subject.report_name()))
    }

    /// The folder of this machine's own records.
    pub fn records(&self, profile: Profile) -> PathBuf {
        self.report().join("records").join(profile.name())
    }

    /// This machine's own records of `problem`.
    pub fn local(&self, profile: Profile, problem: &str) -> PathBuf {
        self.records(profile).join(format!("{problem}.json"))
    }

    /// The accepted records, which are committed.
    pub fn accepted(&self, profile: Profile, problem: &str) -> PathBuf {
        self.root.join("snapshots").join(profile.name()).join(format!("{problem}.json"))
    }

    /// The path relative to the root, for messages.
    pub fn display(&self, path: &Path) -> String {
        shown_path(path.strip_prefix(&self.root).unwrap_or(path))
    }

    /// This machine's records of `problem`; `None` if there are none. The parameters are in the problem's canonical form.
    ///
    /// Errors: a file that cannot be used; the message says what to do. No other problem needs to stop for it.
    pub fn read_local(&self, profile: Profile, problem: &Problem) -> Result<Option<RecordFile>> {
        let of = self.subject.as_ref().map_or(String::new(), Subject::argument);
        let remedy = match problem.measured {
            Some(_) => format!("Run `cs336 measure {} --profile {profile}{of}`, which moves it aside.", problem.name),
            None => "Remove it: this problem measures nothing.".into(),
        };
        let path = self.local(profile, problem.name);
        self.read(&path, problem, profile).map_err(|error| match dangling(&path) {
            // Nothing moves its folder aside.
            Some(link) if link != path => error,
            _ => advised(&error, &remedy),
        })
    }

    /// The accepted records of `problem`, as [`Self::read_local`]. A subject has none.
    pub fn read_accepted(&self, profile: Profile, problem: &Problem) -> Result<Option<RecordFile>> {
        let None = self.subject else { return Ok(None) };
        let path = self.accepted(profile, problem.name);
        self.read(&path, problem, profile).map_err(|error| advised(&error, &self.restoring(&path)))
    }

    /// The accepted records called `name`, as [`Self::read_file`]; the error says what to do.
    pub fn read_accepted_file(&self, name: &str, profile: Profile) -> Result<Option<RecordFile>> {
        let path = self.accepted(profile, name);
        self.read_file(&path, name, profile).map_err(|error| advised(&error, &self.restoring(&path)))
    }

    fn restoring(&self, path: &Path) -> String {
        let command = restoring(&self.root, &self.display(path));
        format!("Restore it: {command}; if it is the same then, remove it and accept a record of now")
    }

    fn read(&self, path: &Path, problem: &Problem, profile: Profile) -> Result<Option<RecordFile>> {
        let Some(file) = self.read_file(path, problem.name, profile)? else { return Ok(None) };
        let Some(measured) = &problem.measured else { return Ok(Some(file)) };
        let canonical = file.with_canonical_params(|params| (measured.parse)(params, profile).ok());
        let file = canonical.with_context(|| self.display(path))?;
        refuse_contradictions(&file, measured)
            .with_context(|| format!("{} holds what no run can write", self.display(path)))?;
        Ok(Some(file))
    }

    /// Reads the record file called `name` without changing its parameters; `None` if it does not exist.
    pub fn read_file(&self, path: &Path, name: &str, profile: Profile) -> Result<Option<RecordFile>> {
        let text = match read_text(path) {
            Ok(text) => text,
            // A file where the folder should be holds no record either; writing a record reports it.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                if let Some(link) = dangling(path) {
                    bail!("{}", self.leads_nowhere(link));
                }
                return Ok(None);
            }
            Err(error) => return Err(error).with_context(|| format!("failed to read {}", self.display(path))),
        };
        let origin = self.display(path);
        let file = RecordFile::parse(&text, &origin)?;
        let is = (file.problem.as_str(), file.profile);
        ensure!(is == (name, profile), "{origin} holds records of {} ({}), not of {name} ({profile})", is.0, is.1);
        Ok(Some(file))
    }

    /// What to do about a link of [`dangling`].
    pub fn leads_nowhere(&self, link: &Path) -> String {
        format!("{} is a link that leads nowhere: mend or remove it", self.display(link))
    }

    /// Renames a record that is `how` to a free name beside it, so that a new one can be written. Returns a sentence that
    /// says where it is.
    pub fn set_aside(&self, path: &Path, how: &str) -> Result<String> {
        let to = free_names_beside(path, how).next().context("there are endlessly many names")?;
        let (from, shown) = (self.display(path), self.display(&to));
        fs::rename(path, &to)
            .map_err(|error| anyhow!("{from} cannot be moved to {shown}: {error}{}", remedy(&error)))?;
        Ok(format!("moved {from} to {shown}"))
    }

    /// Writes the text of a record that is `how` to a free name beside it, which is returned.
    pub fn keep_copy(&self, path: &Path, how: &str, text: &str) -> Result<PathBuf> {
        let to = free_names_beside(path, how).next().context("there are endlessly many names")?;
        write_atomically(&to, text.as_bytes())?;
        Ok(to)
    }

    /// SHA-256 of the code in `kernels/<name>`, followed by every file of `kernels/lib` that it includes directly or
    /// indirectly. Comments do not count, so a kernel's notebook may quote measurements of that kernel.
    pub fn kernel_hash(&self, name: &str) -> Result<String> {
        let mut text = String::new();
        let mut files = vec![name.to_string()];
        let mut at = 0;
        while let Some(file) = files.get(at) {
            let path = self.root.join("kernels").join(file);
            let source = read_text(&path).with_context(|| format!("failed to read kernels/{file}"))?;
            let quoted = |line: &str| Some(line.strip_prefix("#include \"lib/")?.split_once('"')?.0.to_string());
            let included = source.lines().filter_map(quoted).map(|header| format!("lib/{header}"));
            let new: Vec<_> = included.filter(|header| !files.contains(header)).collect();
            files.extend(new);
            text += &code_of(&source);
            at += 1;
        }
        Ok(sha256(text.as_bytes()))
    }

    /// SHA-256 of the emulator's code, in `kernels/emulator/*.h`, which is compiled with each kernel that it runs.
    pub fn emulator_hash(&self) -> Result<String> {
        let folder = self.root.join("kernels/emulator");
        let entries = fs::read_dir(&folder).context("failed to list kernels/emulator")?;
        let mut names = entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
        // An editor's file begins with a dot.
        names.retain(|name| name.to_str().is_some_and(|name| name.ends_with(".h") && !name.starts_with('.')));
        names.sort();
        let mut text = String::new();
        for name in names {
            let path = folder.join(name);
            let source = read_text(&path).with_context(|| format!("failed to read {}", self.display(&path)))?;
            text += &code_of(&source);
        }
        Ok(sha256(text.as_bytes()))
    }
}

/// Names beside the file that nothing has: its own with `.how` at the end, then with a number.
pub fn free_names_beside(path: &Path, how: &str) -> impl Iterator<Item = PathBuf> {
    let ends = (1..).map(move |n| if n == 1 { how.to_string() } else { format!("{how}-{n}") });
    ends.map(|end| path.with_added_extension(end)).filter(|to| fs::symlink_metadata(to).is_err())
}

/// The link that leads nowhere on the way to `path`, which may be the link.
pub fn dangling(path: &Path) -> Option<&Path> {
    path.ancestors().find(|at| at.is_symlink() && !at.exists())
}

/// The error as one text, followed by what to do.
fn advised(error: &anyhow::Error, remedy: &str) -> anyhow::Error {
    anyhow!("{error:#}. {remedy}")
}

/// The lines of `source` without `//` comments, trailing spaces and empty lines.
fn code_of(source: &str) -> String {
    let code = |line: &str| {
        let (mut in_string, mut escaped) = (false, false);
        let end = line.char_indices().find_map(|(at, c)| {
            let starts_comment = !in_string && line[at..].starts_with("//");
            in_string ^= c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            starts_comment.then_some(at)
        });
        line[..end.unwrap_or(line.len())].trim_end().to_string()
    };
    source.lines().map(code).filter(|line| !line.is_empty()).fold(String::new(), |text, line| text + &line + "\n")
}

/// Writes the whole file or nothing: a temporary file in the same folder, synced, then renamed.
///
/// A link is followed, an existing file keeps who may read it, and what is no regular file (a device, a pipe) or is open
/// (/dev/stdout, /dev/fd/3) is written to and not replaced. So is a file that cannot be replaced: one that is a mount of its own,
/// or its folder's owner's in a sticky folder. What other users planted is refused, as [`Target::of`] says.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<()> {
    let descriptor = descriptor(path);
    let Target { path: target, existing } = Target::of(path)?;
    let attempt = || -> io::Result<()> {
        match descriptor {
            Some(1) => return std::io::stdout().write_all(content).and_then(|()| std::io::stdout().flush()),
            Some(2) => return std::io::stderr().write_all(content),
            Some(number) => return open_descriptor(number)?.write_all(content),
            None => {}
        }
        if let Some(existing) = existing.as_ref().filter(|existing| !existing.is_file()) {
            return open_device(&target, existing)?.write_all(content);
        }
        let folder = HeldFolder::of(&target)?;
        let target = folder.join(target.file_name().ok_or(ErrorKind::IsADirectory)?);
        let mut file = partial(&folder.join(OsStr::new("")), &target, existing.as_ref())?;
        file.as_file_mut().write_all(content)?;
        file.as_file().sync_all()?;
        let Err(PersistError { error, .. }) = file.persist(&target) else { return Ok(()) };
        let is_kept =
            [Errno::BUSY, Errno::PERM].map(|errno| Some(errno.raw_os_error())).contains(&error.raw_os_error());
        // What another user has put there since is not written to.
        if !is_kept || existing.is_none() {
            return Err(error);
        }
        let mut in_place = open_in_place(&target).map_err(|_| error)?;
        // Where there is no room, the file keeps what it holds.
        fallocate(&in_place, FallocateFlags::KEEP_SIZE, 0, content.len().max(1) as u64)?;
        in_place.write_all(content)?;
        in_place.set_len(content.len() as u64)?;
        in_place.sync_all()
    };
    attempt().map_err(|error| cannot_write(path, &shown_path(path), &error))
}

/// The message about a file, or a folder for files, that cannot be written: the system's reason, and what to do.
pub fn cannot_write(path: &Path, shown: &str, error: &io::Error) -> anyhow::Error {
    let is_on_the_way = matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NotADirectory);
    match dangling(path).filter(|_| is_on_the_way) {
        Some(link) => {
            anyhow!("{shown} cannot be written: {} is a link that leads nowhere; mend or remove it", shown_path(link))
        }
        None => anyhow!("{shown} cannot be written: {error}{}{}", remedy(error), owner_of_folder(path, error)),
    }
}

/// Whose the folder of `path` is, where that is another user and may be why.
fn owner_of_folder(path: &Path, error: &io::Error) -> String {
    let is_locked = error.raw_os_error() == Some(Errno::PERM.raw_os_error());
    let is_denied = error.kind() == ErrorKind::PermissionDenied && !is_locked;
    let owner = path.parent().filter(|_| is_denied).and_then(|folder| Some(fs::metadata(folder).ok()?.uid()));
    let owner = owner.filter(|&owner| owner != rustix::process::geteuid().as_raw());
    owner.map_or_else(String::new, |owner| format!(", which belongs to user {owner}"))
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::AlreadyExists | ErrorKind::NotADirectory => "; move the file that has its folder's name",
        ErrorKind::IsADirectory => "; move the folder that has its name",
        _ if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
            "; let it be changed (lsattr shows what locks it)"
        }
        _ if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => "; unmount it: it is a mount of its own",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "; make its folder writable",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free space on its disk",
        // A pipe that nobody reads.
        _ if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => "; remove what is in its place",
        ErrorKind::FileTooLarge => "; raise the limit on file sizes (ulimit -f)",
        _ => "",
    }
}

/// `message` of a failure with what to do, where it says that this machine lets no more be written.
pub fn with_room(message: String) -> String {
    let full = [Errno::FBIG, Errno::NOSPC, Errno::DQUOT].map(io::Error::from);
    let said = full.iter().find(|error| message.contains(&error.to_string()));
    said.map_or_else(|| message.clone(), |error| format!("{message}{}", remedy(error)))
}

/// Errors: a row that contradicts its case or that its machine cannot have given. A row of an older revision is only stale.
fn refuse_contradictions(file: &RecordFile, measured: &Measured) -> Result<()> {
    for (i, case) in file.cases.iter().enumerate().filter(|(_, case)| case.revision == measured.revision) {
        if let (Outcome::Measured { row }, Some(run)) = (&case.outcome, file.run(&case.run)) {
            (measured.require_possible)(&case.params, row, &run.machine)
                .with_context(|| format!("case {i} ({})", case.params))?;
        }
    }
    Ok(())
}

/// Lower-case hexadecimal SHA-256.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// As [`sha256`], of a regular file of any size, which is never whole in memory.
pub fn sha256_of_file(path: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut chunk) = (open(path)?, Sha256::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok(hexadecimal(&hash.finalize())),
            Ok(count) => hash.update(&chunk[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests;
