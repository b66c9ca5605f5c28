//! `cs336 grade --subjects`: every folder below a folder, each with a row of a CSV file and a results.json of its own.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::export::csv_field;
use super::printer::Printer;
use super::subject::{SubjectArguments, conditions, grades, problems, require_checks, require_tree_outside};
use super::{Ended, interrupted, watch_for_interrupt};
use crate::harness::grade::{ProblemGrade, points};
use crate::harness::grade_files::gradescope;
use crate::harness::handout::HandoutProblem;
use crate::harness::named_files::require_writable;
use crate::harness::store::{Layout, free_names_beside, write_atomically};
use crate::harness::subject::Subject;
use crate::printable::{distinct_name, first_few, indented, printable, shown_path};
use crate::root::{self, require_own_way};

/// The CSV's name in the output folder.
const TABLE: &str = "grades.csv";
/// The name of each subject's own results, in Gradescope's form.
const RESULTS: &str = "results.json";

/// The most characters of a reason in the table; results.json has the whole.
const REASON_CHARS: usize = 300;

/// One row: a subject's name, its grades, and what stopped it from being graded at all.
struct Row {
    name: String,
    /// In what conditions it was graded; or why it was not.
    note: Result<String, String>,
    /// That other subjects are links to its folder, or it is one to theirs.
    shared: Option<String>,
    grades: Vec<ProblemGrade>,
}

/// Grades each folder in `folder` on `names`, and writes into `output` after each, so that an interrupt loses one at most.
pub fn run(
    layout: &Layout,
    folder: &Path,
    arguments: &SubjectArguments,
    names: &[String],
    checks: &[String],
    output: &Path,
) -> Result<Ended> {
    watch_for_interrupt();
    let problems = problems(names)?;
    require_checks(checks, &problems)?;
    let subjects = subjects(folder)?;
    subjects.iter().try_for_each(|subject| require_tree_outside(subject))?;
    require_apart(output, &subjects, folder)?;
    require_writable([output.join(TABLE).as_path()])?;
    let _claimed = Output::claim(output)?;
    let mut earlier = EarlierTable::read(output)?;
    // Who has made the links in it.
    let maker = fs::metadata(folder)?.uid();
    let (mut rows, mut is_whole, printer) = (Vec::<Row>::new(), true, Printer { outlives: true });
    for subject in &subjects {
        let (name, shared) = (name_of(subject), shared_folder(subject, &subjects));
        let found = arguments.find(subject, None, Some(maker));
        let row = match found.and_then(|found| graded(layout, &found, &problems, checks)) {
            // What an interrupt ended is no fault of the subject, and has no row.
            Err(_) if interrupted() => return Ok(Ended::Interrupted),
            Err(error) => Row { name, note: Err(printable(&format!("{error:#}"))), shared, grades: Vec::new() },
            Ok(None) => return Ok(Ended::Interrupted),
            Ok(Some((note, grades))) => Row { name, note: Ok(printable(&note)), shared, grades },
        };
        if let Some(shared) = &row.shared {
            eprintln!("{}: {shared}", row.name);
        }
        printer.line(row.line());
        // What one name prevents must not cost the others their grades.
        if let Err(error) = write_own(&row, &output.join(subject.file_name().unwrap_or_default())) {
            eprintln!("{}: {error:#}", row.name);
            is_whole = false;
        }
        rows.push(row);
        earlier.keep(&subjects)?;
        write_atomically(&output.join(TABLE), table(&rows, &problems).as_bytes())?;
    }
    earlier.end(&rows, &problems, checks.is_empty())?;
    printer.line(format!("{} subjects; {} has a row for each", rows.len(), shown_path(output.join(TABLE))));
    is_whole &= rows.iter().all(|row| row.note.is_ok() && row.earned() >= row.possible());
    Ok(if is_whole { Ended::Well } else { Ended::WithFindings })
}

/// The output folder, locked. One that was made for it and has got no file is removed with it.
struct Output<'a> {
    path: &'a Path,
    is_new: bool,
    _locked: File,
}

impl<'a> Output<'a> {
    /// Makes the folder where it is missing, and locks it.
    ///
    /// Errors: another user owns it or can write to it, or to what is above it, and could lay a link there for us to write
    /// through; or another command writes its table, which each writes whole.
    fn claim(path: &'a Path) -> Result<Self> {
        let (shown, is_new) = (shown_path(path), !path.exists());
        fs::create_dir_all(path).with_context(|| format!("making {shown}"))?;
        let folder = require_closed(path)?;
        match folder.try_lock() {
            Ok(()) => Ok(Self { path, is_new, _locked: folder }),
            Err(TryLockError::WouldBlock) => {
                bail!("another cs336 writes its grades into {shown}: wait for it, or name another folder by --output")
            }
            Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("locking {shown}")),
        }
    }
}

impl Drop for Output<'_> {
    fn drop(&mut self) {
        if self.is_new {
            // Fails where there is a file in it.
            let _ = fs::remove_dir(self.path);
        }
    }
}

/// The table of a run before this one. It is kept beside the new one, unless that has in the end all that it had.
struct EarlierTable {
    bytes: Vec<u8>,
    /// Where it is kept, once the first row has replaced it.
    copy: Option<PathBuf>,
    table: PathBuf,
}

impl EarlierTable {
    /// Errors: there is a table that cannot be read.
    fn read(output: &Path) -> Result<Self> {
        let table = output.join(TABLE);
        let read = || root::read(&table).with_context(|| format!("reading {}", shown_path(&table)));
        let bytes = if table.is_file() { read()? } else { Vec::new() };
        Ok(Self { bytes, copy: None, table })
    }

    /// Writes it beside the table, once, and says where: under no name of a subject, whose folder has that.
    fn keep(&mut self, subjects: &[PathBuf]) -> Result<()> {
        if self.bytes.is_empty() || self.copy.is_some() {
            return Ok(());
        }
        let is_no_subjects = |to: &PathBuf| subjects.iter().all(|subject| subject.file_name() != to.file_name());
        let mut free = free_names_beside(&self.table, "before").filter(is_no_subjects);
        let copy = self.copy.insert(free.next().context("there are endlessly many names")?);
        write_atomically(copy, &self.bytes)?;
        eprintln!("the table of the run before is kept as {} until this one has all of it", shown_path(copy));
        Ok(())
    }

    /// Removes what is kept if the new table has its columns and, for each of its subjects, a row with no fewer points to earn: each
    /// check has run, and none is "not graded" that was.
    fn end(self, rows: &[Row], problems: &[&HandoutProblem], is_of_all_checks: bool) -> Result<()> {
        let Some(copy) = self.copy else { return Ok(()) };
        let earlier = String::from_utf8_lossy(&self.bytes);
        let begin = |row: &Row| csv_field(row.name.clone()) + if row.note.is_ok() { "," } else { ",0,0," };
        let begins: Vec<String> = rows.iter().map(begin).collect();
        let has_row = |line: &str| begins.iter().any(|begin| line.starts_with(begin));
        let has_columns = earlier.lines().next() == table(&[], problems).lines().next();
        if is_of_all_checks && has_columns && earlier.lines().skip(1).all(has_row) {
            fs::remove_file(&copy).with_context(|| format!("removing {}", shown_path(&copy)))?;
        }
        Ok(())
    }
}

/// The folder, opened. Errors: others than this user own it or can write to it, or to what is above it.
fn require_closed(path: &Path) -> Result<File> {
    let shown = shown_path(path);
    let folder = File::open(path).with_context(|| format!("opening {shown}"))?;
    let (found, user) = (folder.metadata()?, rustix::process::geteuid().as_raw());
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    ensure!(
        owner == user && mode & 0o022 == 0,
        "{shown}, of --output, belongs to user {owner} with mode {mode:o}, so others can put links there: name a folder \
         that only user {user} can write to"
    );
    require_own_way(path, "others can put links there; name another folder by --output")?;
    Ok(folder)
}

/// In what conditions a subject was graded, and its grades; `None` when interrupted. Errors: why it could not be graded.
fn graded(
    layout: &Layout,
    subject: &Subject,
    problems: &[&'static HandoutProblem],
    checks: &[String],
) -> Result<Option<(String, Vec<ProblemGrade>)>> {
    Ok(grades(layout, subject, problems, checks, |_| ())?.map(|grades| (conditions(subject), grades)))
}

/// Writes the subject's own results into its folder `own` of the output. Where it was not graded, earlier grades stay.
fn write_own(row: &Row, own: &Path) -> Result<()> {
    ensure!(
        own.file_name().is_none_or(|name| name != TABLE),
        "its folder has the name of the table, so it has a row there and no {RESULTS}; rename its folder"
    );
    fs::create_dir_all(own).with_context(|| format!("making {}", shown_path(own)))?;
    require_closed(own)?;
    let file = own.join(RESULTS);
    ensure!(
        row.note.is_ok() || !holds_grades(&file),
        "{} is of an earlier run, since this one did not grade it",
        shown_path(&file)
    );
    let note = row.note.as_ref().unwrap_or_else(|error| error);
    let note = [Some(note), row.shared.as_ref()].into_iter().flatten().cloned().collect::<Vec<_>>().join("; ");
    let text = gradescope(&row.grades, Some(&indented(&note, 4)))?;
    write_atomically(&file, text.as_bytes())
}

fn holds_grades(results: &Path) -> bool {
    let text = root::read_text(results).unwrap_or_default();
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    value["tests"].as_array().is_some_and(|tests| !tests.is_empty())
}

/// Errors: the output folder is, lies in, or holds a folder of a subject or theirs. A link that a subject leaves there would
/// lead our writing to any file, and what we write would be graded the next time.
fn require_apart(output: &Path, subjects: &[PathBuf], folder: &Path) -> Result<()> {
    let output_now = std::path::absolute(output)?;
    // What is still to be made has no links.
    let made = output_now.ancestors().find_map(|made| Some((made, made.canonicalize().ok()?)));
    let (made, real) = made.context("the output folder has no root")?;
    let real_output = real.join(output_now.strip_prefix(made)?);
    for subject in subjects.iter().map(PathBuf::as_path).chain([folder]) {
        let real = subject.canonicalize().with_context(|| format!("{} cannot be opened", shown_path(subject)))?;
        ensure!(
            !real_output.starts_with(&real) && !real.starts_with(&real_output),
            "--output {} and {}, whose files others write, must not lie in each other; name another folder",
            shown_path(output),
            shown_path(subject)
        );
    }
    Ok(())
}

fn name_of(subject: &Path) -> String {
    distinct_name(subject.file_name().unwrap_or_default())
}

/// That `subject` leads to the same folder as others do, or into one of theirs.
fn shared_folder(subject: &Path, subjects: &[PathBuf]) -> Option<String> {
    let real = subject.canonicalize().ok()?;
    let is_shared = |other: &&PathBuf| {
        let other_real = other.canonicalize();
        *other != subject && other_real.is_ok_and(|other| other.starts_with(&real) || real.starts_with(other))
    };
    let names: Vec<String> = subjects.iter().filter(is_shared).map(|other| name_of(other)).collect();
    (!names.is_empty()).then(|| format!("its folder is also that of {}", first_few(names.into_iter())))
}

/// The folders in `folder`, by name; hidden ones are left out, and what is no folder is named.
fn subjects(folder: &Path) -> Result<Vec<PathBuf>> {
    let shown = shown_path(folder);
    let entries = fs::read_dir(folder).with_context(|| format!("the subjects' folder {shown} cannot be opened"))?;
    let paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let is_hidden = |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let (mut folders, others): (Vec<PathBuf>, Vec<PathBuf>) =
        paths.into_iter().filter(|path| !is_hidden(path)).partition(|path| path.is_dir());
    for other in others {
        eprintln!("{} is no folder, so it is not graded", shown_path(&other));
    }
    ensure!(!folders.is_empty(), "{shown} holds no folder, so nothing was graded; each subject is a folder in it");
    folders.sort();
    Ok(folders)
}

impl Row {
    fn earned(&self) -> f64 {
        self.grades.iter().map(|grade| grade.earned).sum()
    }

    fn possible(&self) -> f64 {
        self.grades.iter().map(|grade| grade.points).sum()
    }

    /// Why points are missing, and whose folder it is too, each reason on one line and cut to [`REASON_CHARS`].
    fn reasons(&self) -> Vec<String> {
        let lost = self.grades.iter().flat_map(|grade| {
            grade.parts.iter().flat_map(|part| &part.lost).map(move |reason| format!("{}: {reason}", grade.name))
        });
        let on_one_line = |reason: String| reason.split_whitespace().collect::<Vec<_>>().join(" ");
        let cut = |reason: String| match reason.char_indices().nth(REASON_CHARS) {
            Some((at, _)) => format!("{}..", &reason[..at]),
            None => reason,
        };
        let first = [self.note.as_ref().err().cloned(), self.shared.clone()];
        first.into_iter().flatten().chain(lost).map(|reason| cut(on_one_line(reason))).collect()
    }

    fn line(&self) -> String {
        match &self.note {
            Err(error) => {
                let words = error.trim_start_matches("not graded: ");
                format!("      not graded  {}: {}", self.name, indented(words, 18))
            }
            Ok(_) => format!("{:>5} / {:<4} {}", points(self.earned()), points(self.possible()), self.name),
        }
    }
}

fn table(rows: &[Row], problems: &[&HandoutProblem]) -> String {
    let names = problems.iter().map(|problem| problem.name.to_string());
    let head = ["subject", "earned", "of"].map(String::from).into_iter().chain(names).chain(["reasons".to_string()]);
    let row = |row: &Row| {
        let of_problem = |problem: &&HandoutProblem| {
            row.grades
                .iter()
                .find(|grade| grade.name == problem.name)
                .map(|grade| points(grade.earned))
                .unwrap_or_default()
        };
        let mut cells = vec![row.name.clone(), points(row.earned()), points(row.possible())];
        cells.extend(problems.iter().map(of_problem));
        cells.push(row.reasons().join("; "));
        cells
    };
    let lines = std::iter::once(head.collect()).chain(rows.iter().map(row));
    lines.map(|cells: Vec<String>| cells.into_iter().map(csv_field).collect::<Vec<_>>().join(",") + "\n").collect()
}
