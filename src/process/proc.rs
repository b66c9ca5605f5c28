//! Other processes, as /proc shows them (proc(5)).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::time::Duration;

use rustix::process::Pid;

use super::child::wait_until;

/// What the variables and arguments of a process have at most (execve(2)).
const MOST_BYTES: usize = 6 << 20;
/// How long the kernel may take to execute a program: it reads the file first.
const EXEC_LIMIT: Duration = Duration::from_secs(5);

/// Whether the process exists and is not a zombie. We cannot reap a zombie of another parent.
pub fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.and_then(stat_of).is_some_and(|stat| !has_ended(&stat))
}

/// Whether all of its threads that have not ended are stopped; `None` where there are none.
pub fn is_stopped(pid: Pid) -> Option<bool> {
    let stats = threads_of(pid).filter_map(|folder| stat_in(&folder));
    let mut living = stats.filter(|stat| !has_ended(stat)).peekable();
    living.peek()?;
    Some(living.all(|stat| stat.starts_with(['T', 't'])))
}

/// How long its threads have run on a processor.
pub fn processor_time_of(pid: Pid) -> Duration {
    // In nanoseconds, then the time that it waited.
    let run = |folder: String| read_lossy(&format!("{folder}/schedstat"))?.split(' ').next()?.parse::<u64>().ok();
    Duration::from_nanos(threads_of(pid).filter_map(run).sum())
}

/// The fields of its stat from the third on, "S 122 ..": those before are the number and a name that may hold any byte.
pub fn stat_of(pid: Pid) -> Option<String> {
    stat_in(&folder_of(pid))
}

fn stat_in(folder: &str) -> Option<String> {
    let stat = read_lossy(&format!("{folder}/stat"))?;
    stat.rsplit_once(") ").map(|(_, rest)| rest.to_string())
}

/// Whether such a stat is of a thread that has ended, or of a process without others.
fn has_ended(stat: &str) -> bool {
    stat.starts_with(['Z', 'X'])
}

/// The folder in which /proc shows a process with what it has. The folder of its number is that of its first thread, which shows
/// nothing once that has ended, also where others go on.
pub fn folder_of(pid: Pid) -> String {
    let first = format!("/proc/{}", pid.as_raw_nonzero());
    let lives = |folder: &String| stat_in(folder).is_some_and(|stat| !has_ended(&stat));
    if lives(&first) { first } else { threads_of(pid).find(lives).unwrap_or(first) }
}

fn threads_of(pid: Pid) -> impl Iterator<Item = String> {
    let folder = format!("/proc/{}/task", pid.as_raw_nonzero());
    numbers_in(&folder).map(move |thread| format!("{folder}/{thread}"))
}

/// A file of /proc, whose names of processes need not be UTF-8.
pub fn read_lossy(path: &str) -> Option<String> {
    std::fs::read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// The processes that have `variable`, as in `NAME=value`, in their environment, or a path below that value; no zombies.
///
/// The kernel shows no environment while a process executes a program: this waits for all such processes together, at most
/// [`EXEC_LIMIT`], since a process can also hide its environment for good.
pub fn processes_with(variable: &str) -> Vec<u32> {
    let mut found = Vec::new();
    let mut left: Vec<Pid> = numbers_in("/proc").filter_map(Pid::from_raw).collect();
    wait_until(EXEC_LIMIT, || {
        left.retain(|&pid| {
            let environment = environment_of(pid);
            if environment.as_ref().is_some_and(|variables| contains(variables, variable)) {
                found.push(pid.as_raw_nonzero().get().unsigned_abs());
            }
            environment.is_none()
        });
        left.is_empty()
    });
    found
}

/// As [`processes_with`], of one process.
pub fn has_variable(pid: u32, variable: &str) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    let mut environment = None;
    wait_until(EXEC_LIMIT, || {
        environment = environment_of(pid);
        environment.is_some()
    });
    environment.is_some_and(|variables| contains(&variables, variable))
}

/// Whether an environment has `variable`, or a path below its value.
fn contains(environment: &[u8], variable: &str) -> bool {
    let mut rests = environment.split(|&byte| byte == 0).filter_map(|own| own.strip_prefix(variable.as_bytes()));
    rests.any(|rest| matches!(rest, [] | [b'/', ..]))
}

/// Its environment, empty where this user may not read it or there is none; `None` while it executes a program.
fn environment_of(pid: Pid) -> Option<Vec<u8>> {
    // A process that ends has no such file.
    let Ok(environment) = read_at_once(&format!("{}/environ", folder_of(pid))) else { return Some(Vec::new()) };
    (!environment.is_empty() || has_no_environment(pid)).then_some(environment)
}

/// By one call: where the process executes another program, the next one would find nothing.
fn read_at_once(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MOST_BYTES];
    let count = File::open(path)?.read(&mut bytes)?;
    bytes.truncate(count);
    Ok(bytes)
}

/// Whether it has no memory, as a zombie and a thread of the kernel, or no variables: not that it executes a program.
fn has_no_environment(pid: Pid) -> bool {
    let stat = stat_of(pid).unwrap_or_default();
    // vsize, startcode, env_start and env_end; the text starts with field 3. The kernel sets startcode last of these.
    let [memory, code, start, end] = [23, 26, 50, 51].map(|field| stat.split(' ').nth(field - 3).unwrap_or("0"));
    memory == "0" || (code != "0" && start == end)
}

/// The processes that this one has started, and those that these have started.
pub fn descendants_of(above: Pid) -> Vec<Pid> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for pid in numbers_in("/proc") {
        let parent = Pid::from_raw(pid).and_then(stat_of).and_then(|stat| stat.split(' ').nth(1)?.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(pid);
    }
    let mut found = children.remove(&above.as_raw_nonzero().get()).unwrap_or_default();
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        found.extend(children.remove(pid).unwrap_or_default());
        at += 1;
    }
    found.into_iter().filter_map(Pid::from_raw).collect()
}

/// The entries that are numbers, as those of processes and threads are.
fn numbers_in(folder: &str) -> impl Iterator<Item = i32> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}
