//! The Python package as `make wheel` left it, where that has run on this tree.

use serde_json::json;

use super::*;

/// Why the package cannot be tested as it stands in `src/python`.
fn not_built(root: &Path) -> Option<String> {
    let built = root.join("target/wheel/cs336");
    if !built.join("libcs336.so").is_file() {
        return Some("there is no target/wheel/cs336/libcs336.so; run `make wheel`".into());
    }
    let files = fs::read_dir(root.join("src/python/cs336")).unwrap().map(|entry| entry.unwrap().path());
    let mut sources = files.filter(|path| path.extension().is_some_and(|ending| ending == "py"));
    let differs = |path: &PathBuf| fs::read(built.join(path.file_name().unwrap())).ok() != fs::read(path).ok();
    sources.find(differs).map(|path| format!("{} has changed since `make wheel`; run it again", path.display()))
}

#[test]
fn the_package_passes_its_tests_on_a_cpu_and_on_two_gloo_ranks() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if let Some(reason) = not_built(root) {
        eprintln!("skipped: {reason}");
        return;
    }
    let mut python = Command::new(root.join(".venv/bin/python"));
    python.arg(root.join("src/python/tests/test_wheel.py")).env("PYTHONPATH", root.join("target/wheel"));
    let output = python.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
}

/// The wheel's Python without its library, which its data parallelism does not need. `change` replaces a text in it.
fn python_alone(change: (&str, &str)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let [package, facts] = ["cs336", "cs336-9.9.dist-info"].map(|name| folder.path().join(name));
    fs::create_dir(&package).unwrap();
    fs::create_dir(&facts).unwrap();
    fs::write(facts.join("METADATA"), "Metadata-Version: 2.1\nName: cs336\nVersion: 9.9\n").unwrap();
    let imports = "from .parallel import DistributedDataParallel\nfrom .sharded import ShardedOptimizer\n";
    fs::write(package.join("__init__.py"), imports).unwrap();
    for file in ["parallel.py", "buckets.py", "sharded.py"] {
        let code =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/python/cs336").join(file)).unwrap();
        fs::write(package.join(file), code.replace(change.0, change.1)).unwrap();
    }
    folder
}

/// What two Gloo ranks measured from Python, with these modules there.
fn steps_with(modules: &Path) -> [Value; 2] {
    let folder = tempfile::tempdir().unwrap();
    let [input, output, store] = ["input.json", "output.json", "store"].map(|name| folder.path().join(name));
    let params = json!({"backend": "gloo", "world_size": 2, "size": "tiny", "context_length": 16, "batch_size": 1,
        "vocab_size": 500, "bucket_size_mb": 1.0, "wheel": true, "rounds": 2, "warmup": 1, "steps": 1});
    fs::write(&input, json!({"params": params, "strategies": [], "store": store}).to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cs336"));
    command.args(["launch", "--task", "ddp_step", "--world-size", "2", "--input"]).arg(&input);
    command.arg("--output").arg(&output).current_dir(env!("CARGO_MANIFEST_DIR")).env("PYTHONPATH", modules);
    let said = output_text(&command.output().unwrap());
    let ranks = fs::read_to_string(&output).unwrap_or_else(|_| panic!("{said}"));
    serde_json::from_str::<[Value; 2]>(&ranks).unwrap().map(|rank| rank["from_python"].clone())
}

/// The steps that each column has timed.
fn counts(rank: &Value) -> Vec<(&str, usize)> {
    let columns = rank["seconds"].as_object().unwrap();
    columns.iter().map(|(column, seconds)| (column.as_str(), seconds.as_array().unwrap().len())).collect()
}

#[test]
fn the_wheel_and_pytorch_train_in_turns_on_two_gloo_ranks_and_end_at_the_same_parameters() {
    for rank in steps_with(python_alone(("", "")).path()) {
        let columns = ["pytorch", "pytorch_sharded", "single", "wheel", "wheel_sharded"];
        assert_eq!(counts(&rank), columns.map(|column| (column, 2)), "{rank}");
        assert_eq!(rank["wheel"], json!({"kind": "measured", "row": "9.9"}));
        assert_eq!(rank["off"], 0.0, "a sum over two ranks has one order");
    }
}

#[test]
fn a_wheel_that_averages_wrong_is_far_off() {
    for rank in steps_with(python_alone(("dist.ReduceOp.SUM if", "dist.ReduceOp.MAX if")).path()) {
        assert!(rank["off"].as_f64().unwrap() > 0.3, "{rank}");
    }
}

#[test]
fn without_a_wheel_the_other_columns_are_measured_and_its_own_have_the_remedy() {
    for rank in steps_with(Path::new("")) {
        assert_eq!(counts(&rank), ["pytorch", "pytorch_sharded", "single"].map(|column| (column, 2)), "{rank}");
        let reason = "cs336 is not installed: run make wheel, then python -m pip install dist/cs336-*.whl";
        assert_eq!(rank["wheel"], json!({"kind": "not_run", "reason": reason}));
    }
}

#[test]
fn the_official_tests_without_a_wheel_name_the_remedy() {
    let tree = Tree::new();
    let output = tree.command(&["official", "."]).env_remove("PYTHON").output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the wheel is not installed: run `make wheel`, or install dist/cs336-*.whl"), "{said}");
    // A Python without the package.
    let mut command = tree.command(&["official", "."]);
    let output = command.env("PYTHON", "python3").env_remove("PYTHONPATH").output().unwrap();
    let said = output_text(&output);
    assert!(!output.status.success() && said.contains("python3 cannot import the wheel's cs336: run `make"), "{said}");
}
