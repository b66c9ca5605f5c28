//! The Python package as `make wheel` left it, where that has run on this tree.

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
