//! Measuring that is killed or interrupted: what is kept, and what is left running.

use super::*;

/// Gives the tree a grid of many slow cases, each half a second or so of additions, and starts measuring it.
fn start_slow_measuring(tree: &Tree) -> Child {
    let path = tree.path(format!("suites/{PROBLEM}.toml"));
    let suite: toml::Table = fs::read_to_string(&path).unwrap().parse().unwrap();
    let mut keys = suite["cpu"].as_table().unwrap().iter().next().unwrap().1.as_table().unwrap().clone();
    keys.insert("iterations".into(), (0..40i64).map(|i| 200_000 + i).collect::<Vec<_>>().into());
    let grids = toml::Table::from_iter([("slow".to_string(), toml::Value::Table(keys))]);
    let text = toml::to_string(&toml::Table::from_iter([("cpu".to_string(), toml::Value::Table(grids))]));
    fs::write(&path, text.unwrap()).unwrap();
    let mut child = tree.command(&["measure", PROBLEM, "--profile", "cpu"]).stderr(Stdio::null()).spawn().unwrap();
    let are_two_recorded = || {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be stopped");
        recorded_cases(tree) >= 2
    };
    assert!(wait_until(Duration::from_secs(120), are_two_recorded), "no two cases were recorded");
    child
}

/// The number of recorded cases. If the record exists, it must be complete.
fn recorded_cases(tree: &Tree) -> usize {
    let text = fs::read_to_string(tree.record_path());
    text.map_or(0, |text| RecordFile::parse(&text, "the record").unwrap().cases.len())
}

/// Waits until no process of this tree is left.
fn wait_for_orphans(tree: &Tree) {
    let of_this_tree = format!("CS336_ROOT={}", tree.folder.path().display());
    let count = || {
        let processes = fs::read_dir("/proc").unwrap().filter_map(|e| fs::read(e.ok()?.path().join("environ")).ok());
        processes.filter(|environment| String::from_utf8_lossy(environment).contains(&of_this_tree)).count()
    };
    assert!(wait_until(Duration::from_secs(60), || count() == 0), "a worker outlived its parent");
}

#[test]
fn kill_9_in_the_middle_loses_at_most_the_running_case() {
    let tree = Tree::new();
    let mut child = start_slow_measuring(&tree);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(recorded_cases(&tree) >= 2);
    wait_for_orphans(&tree);
    let dry = output_text(&tree.run(&["measure", PROBLEM, "--profile", "cpu", "--resume", "--dry-run"]));
    let pending = dry.lines().filter(|l| l.contains("cpu.slow")).count();
    let total = suite::load(tree.folder.path(), problem()).unwrap().unwrap().cases(Profile::Cpu).count();
    assert_eq!(pending + recorded_cases(&tree), total, "{dry}");
}

#[test]
fn an_interrupt_keeps_what_was_measured_and_exits_with_130() {
    let tree = Tree::new();
    let mut child = start_slow_measuring(&tree);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(recorded_cases(&tree) >= 2);
    wait_for_orphans(&tree);
}
