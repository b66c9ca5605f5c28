//! NVIDIA's nsys in Kineto's place: a step for it to watch, and the import of the SQLite file that it exports.
//!
//! The tables and columns are those of the documentation's "SQLite Schema Reference" (Nsight Systems User Guide); nsys
//! makes a table only if it has a row, and adds columns from version to version.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use rusqlite::types::Value as Cell;
use rusqlite::{Connection, OpenFlags};
use serde_json::Value;
use tch::Device;

use super::measure::Params;
use super::step::ProfiledBench;
use crate::torch::nvtx::range;
use crate::torch::profiler::with_nvtx;
use crate::torch::trace::{Event, Source, Trace};

/// Opens the text of the range around everything that [`step`] does; the case's parameters follow it.
const MARKER: &str = "cs336 nsys_profile ";

/// Runs the warm-up and one step of a case with its ranges as NVTX ranges: what `nsys profile` is to watch.
pub fn step(params: &Params, device: Device) -> Result<()> {
    // Once in a process, and ranges have names that live as long as it.
    let marker = Box::leak(format!("{MARKER}{}", serde_json::to_string(params)?).into_boxed_str());
    with_nvtx(|| {
        range(marker, || {
            let mut bench = ProfiledBench::new(params, device)?;
            bench.warm_up()?;
            bench.step().map(drop)
        })
    })
}

/// What an export holds of a [`step`].
#[derive(Debug)]
pub struct Import {
    pub params: Value,
    pub trace: Trace,
    /// The GPUs of the machine that was profiled.
    pub gpus: Vec<String>,
    /// What nsys itself complained of.
    pub complaints: Vec<String>,
}

/// Reads the file that `nsys export --type sqlite` wrote.
///
/// Errors: a file that is no such export, or one of another program than `cs336 nsys step`.
pub fn read(path: &Path) -> Result<Import> {
    let open = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY);
    let database = Database(open.with_context(|| format!("opening {}", path.display()))?);
    import(&database).with_context(|| format!("{} is no SQLite export of nsys that can be read", path.display()))
}

fn import(database: &Database) -> Result<Import> {
    let strings = database.strings()?;
    let text = |id: &Cell| integer(id).and_then(|id| strings.get(&id)).cloned().unwrap_or_default();
    let (params, marker) = marked(database, &strings)?;
    // The upper bits of a thread's number are those of its process.
    let process = |thread: i64| thread >> 24;
    let ours = |cell: &Cell| integer(cell).is_none_or(|number| process(number) == process(marker.thread));
    let inside = |start: i64| start >= marker.start_ns && start < marker.end_ns();
    let mut events = Vec::new();
    for row in nvtx_ranges(database, &strings)? {
        let is_marker = row.start_ns == marker.start_ns && row.name == marker.name;
        if row.thread == marker.thread && inside(row.start_ns) && !is_marker {
            events.push(row);
        }
    }
    let mut add = |source, table: &str, name: &str, thread: &str, owner: &str| -> Result<()> {
        for row in database.rows(table, &["start", "end", thread, "correlationId", name, owner])? {
            let [Some(start_ns), Some(end_ns)] = [integer(&row[0]), integer(&row[1])] else { continue };
            if !ours(&row[5]) || start_ns < marker.start_ns {
                continue;
            }
            let name = match source {
                Source::Memcpy => copied(integer(&row[4])),
                Source::Memset => "Memset".into(),
                _ => text(&row[4]),
            };
            let (thread, correlation) = (integer(&row[2]).unwrap_or(0), integer(&row[3]));
            events.push(Event { source, name, start_ns, duration_ns: end_ns - start_ns, thread, correlation });
        }
        Ok(())
    };
    add(Source::Kernel, "CUPTI_ACTIVITY_KIND_KERNEL", "demangledName", "streamId", "globalPid")?;
    add(Source::Memcpy, "CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind", "streamId", "globalPid")?;
    add(Source::Memset, "CUPTI_ACTIVITY_KIND_MEMSET", "value", "streamId", "globalPid")?;
    // Calls of the driver stand in the same table.
    add(Source::Call, "CUPTI_ACTIVITY_KIND_RUNTIME", "nameId", "globalTid", "globalTid")?;
    let gpus = database.rows("TARGET_INFO_GPU", &["name"])?.iter().filter_map(|row| words(&row[0])).collect();
    let complaints = database.rows("DIAGNOSTIC_EVENT", &["text"])?.iter().filter_map(|row| words(&row[0])).collect();
    Ok(Import { params, trace: Trace { events }, gpus, complaints })
}

/// Of what to what a copy is, in Kineto's words; the numbers are `CUpti_ActivityMemcpyKind` (`cupti_activity.h`).
fn copied(kind: Option<i64>) -> String {
    let words = match kind {
        Some(1) => " HtoD",
        Some(2) => " DtoH",
        Some(8) => " DtoD",
        Some(9) => " HtoH",
        Some(10) => " PtoP",
        _ => "",
    };
    format!("Memcpy{words}")
}

/// The parameters in the marker's text, and the marker.
fn marked(database: &Database, strings: &HashMap<i64, String>) -> Result<(Value, Event)> {
    let mut markers = nvtx_ranges(database, strings)?;
    markers.retain(|event| event.name.starts_with(MARKER));
    let marker = match markers.len() {
        1 => markers.remove(0),
        0 => {
            bail!("it holds no NVTX range of a step: record one with `nsys profile --trace=cuda,nvtx cs336 nsys step`")
        }
        n => bail!("it holds {n} steps: record one at a time"),
    };
    // What libtorch may add to a range's name stands behind the parameters.
    let mut values = serde_json::Deserializer::from_str(&marker.name[MARKER.len()..]).into_iter::<Value>();
    let params = values.next().context("the step's range has no parameters")??;
    Ok((params, marker))
}

/// The push/pop ranges of the default domain; libraries keep theirs in domains of their own.
fn nvtx_ranges(database: &Database, strings: &HashMap<i64, String>) -> Result<Vec<Event>> {
    const PUSH_POP: i64 = 59;
    let columns = ["start", "end", "globalTid", "text", "textId", "eventType", "domainId"];
    let mut ranges = Vec::new();
    for row in database.rows("NVTX_EVENTS", &columns)? {
        let [Some(start_ns), Some(end_ns), Some(thread)] = [0, 1, 2].map(|i: usize| integer(&row[i])) else { continue };
        let other_domain = integer(&row[6]).is_some_and(|domain| domain != 0);
        if integer(&row[5]).is_some_and(|kind| kind != PUSH_POP) || other_domain {
            continue;
        }
        let text = words(&row[3]).or_else(|| strings.get(&integer(&row[4])?).cloned()).unwrap_or_default();
        let name = if text.starts_with(MARKER) { text } else { without_suffix(&text).to_string() };
        let duration_ns = end_ns - start_ns;
        ranges.push(Event { source: Source::Range, name, start_ns, duration_ns, thread, correlation: None });
    }
    Ok(ranges)
}

/// libtorch adds ", seq = 7" and ", op_id = 9" to the names of what it marks.
fn without_suffix(text: &str) -> &str {
    text.split(',').next().unwrap_or(text).trim_end()
}

/// An export, opened for reading.
struct Database(Connection);

impl Database {
    fn strings(&self) -> Result<HashMap<i64, String>> {
        let rows = self.rows("StringIds", &["id", "value"])?;
        ensure!(!rows.is_empty(), "it has no table StringIds");
        Ok(rows.iter().filter_map(|row| Some((integer(&row[0])?, words(&row[1])?))).collect())
    }

    /// All rows of `table`, none if it does not exist; a column that it lacks is null.
    fn rows(&self, table: &str, columns: &[&str]) -> Result<Vec<Vec<Cell>>> {
        let mut about = self.0.prepare("SELECT name FROM pragma_table_info(?1)")?;
        let known: HashSet<String> = about.query_map([table], |row| row.get(0))?.collect::<Result<_, _>>()?;
        if known.is_empty() {
            return Ok(Vec::new());
        }
        let column = |&name: &&str| if known.contains(name) { format!("\"{name}\"") } else { "NULL".into() };
        let list = columns.iter().map(column).collect::<Vec<_>>().join(", ");
        let mut query = self.0.prepare(&format!("SELECT {list} FROM \"{table}\""))?;
        let rows = query.query_map([], |row| (0..columns.len()).map(|i| row.get(i)).collect())?;
        rows.collect::<Result<_, _>>().with_context(|| format!("reading its table {table}"))
    }
}

fn integer(cell: &Cell) -> Option<i64> {
    match cell {
        Cell::Integer(value) => Some(*value),
        _ => None,
    }
}

fn words(cell: &Cell) -> Option<String> {
    match cell {
        Cell::Text(text) => Some(text.clone()),
        _ => None,
    }
}
