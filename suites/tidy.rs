//! Rules of the repository: the registry matches the files, dependencies point down, files stay small.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cs336::harness::device::DEVICE;
use cs336::harness::grade::points;
use cs336::harness::handout::{DeliverableKind, HANDOUT, HandoutProblem, by_name};
use cs336::harness::record::Profile;
use cs336::harness::store::Layout;
use cs336::problems::REGISTRY;

#[path = "tidy/functions.rs"]
mod functions;
#[path = "tidy/newcomer.rs"]
mod newcomer;
#[path = "tidy/templates.rs"]
mod templates;

/// Files that may be longer than [`MAX_LINES`], each with its reason.
const LONG: &[(&str, &str)] =
    &[("src/report/markdown.rs", "one writer over one stream of events, whose state every arm shares")];
const MAX_LINES: usize = 350;

/// Each module folder and the folders directly below it, from the bottom. It may use all folders below those too.
const ROOMS: &[(&str, &[&str])] = &[
    ("units", &[]),
    ("printable", &[]),
    ("json", &["printable"]),
    ("root", &["printable"]),
    ("error", &["units"]),
    ("process", &["error", "json", "root"]),
    ("torch", &["process"]),
    ("cuda", &["torch"]),
    ("attention", &["cuda"]),
    ("model", &["attention"]),
    ("collective", &["cuda"]),
    ("parallel", &["model", "collective"]),
    ("python", &["model"]),
    ("harness", &["process"]),
    ("report", &["harness"]),
    ("subject", &["parallel", "harness"]),
    ("bench", &["subject"]),
    ("checks", &["bench"]),
    ("problems", &["checks"]),
    ("cli", &["problems", "report"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

fn stems(folder: &str, extension: &str) -> BTreeSet<String> {
    // git does not keep empty folders, so a missing folder counts as empty.
    let entries = fs::read_dir(root().join(folder)).into_iter().flatten().map(|e| e.unwrap().path());
    let wanted = entries.filter(|p| p.extension().is_some_and(|e| e == extension));
    wanted.map(|p| p.file_stem().unwrap().to_string_lossy().into_owned()).collect()
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(rust_files(&path)),
            false if path.extension().is_some_and(|e| e == "rs") => found.push(path),
            false => {}
        }
    }
    found
}

#[test]
fn the_registry_follows_the_handout() {
    let order: Vec<usize> =
        REGISTRY.iter().map(|p| HANDOUT.iter().position(|h| h.name == p.name).expect(p.name)).collect();
    assert!(order.windows(2).all(|w| w[0] < w[1]), "the registry is not in the handout's order, or names one twice");
    for problem in REGISTRY {
        let handout = by_name(problem.name).unwrap();
        assert!(!problem.answers.is_empty(), "{} answers no part", problem.name);
        for part in problem.answers {
            let part = handout.part(part).unwrap_or_else(|| panic!("{} has no part {part:?}", problem.name));
            let checked = problem.checks.iter().any(|c| c.part == part.id);
            assert!(
                checked || !part.kinds.contains(&DeliverableKind::Code),
                "{} ({}) hands in code that no check covers",
                problem.name,
                part.id
            );
        }
    }
}

#[test]
fn every_check_has_a_name_of_its_own_and_a_part_of_its_problem() {
    for problem in REGISTRY {
        let names: BTreeSet<_> = problem.checks.iter().map(|c| c.name).collect();
        assert_eq!(names.len(), problem.checks.len(), "{} has two checks of one name", problem.name);
        for check in problem.checks {
            let known = by_name(problem.name).unwrap().part(check.part).is_some();
            assert!(known, "{}::{} grades part {:?}, which does not exist", problem.name, check.name, check.part);
        }
    }
}

#[test]
fn every_problem_has_its_files_and_no_file_is_an_orphan() {
    let all: BTreeSet<String> = REGISTRY.iter().map(|p| p.name.to_string()).collect();
    let measured: BTreeSet<String> =
        REGISTRY.iter().filter(|p| p.measured.is_some()).map(|p| p.name.to_string()).collect();
    let mut templates = stems("templates", "md");
    assert!(templates.remove("summary"), "templates/summary.md, the report's first page, is missing");
    assert_eq!(templates, all, "templates/*.md and the registry differ");
    assert_eq!(stems("suites", "toml"), measured, "suites/*.toml and the measured problems differ");
    for profile in Profile::ALL {
        let mut records = stems(&format!("snapshots/{profile}"), "json");
        records.retain(|name| (profile, name.as_str()) != (Profile::Gpu, DEVICE));
        assert!(records.is_subset(&measured), "snapshots/{profile} has records without a problem: {records:?}");
    }
}

#[test]
fn every_suite_parses_and_measures_something_on_a_cpu() {
    let layout = Layout::at(root());
    for problem in REGISTRY.iter().filter(|p| p.measured.is_some()) {
        let suite = cs336::harness::suite::load(&layout.root, problem).unwrap().unwrap();
        assert!(suite.cases(Profile::Cpu).next().is_some(), "{} has no cpu grid", problem.name);
    }
}

#[test]
fn the_readme_counts_the_points_that_are_answered() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    for chapter in [&["1.1"][..], &["1.2", "1.3"], &["2"], &["3"]] {
        let problems = || HANDOUT.iter().filter(|p| chapter.iter().any(|c| p.section.starts_with(c)));
        let answers = |p: &HandoutProblem| REGISTRY.iter().find(|e| e.name == p.name).map_or(&[][..], |e| e.answers);
        let parts = problems().flat_map(|p| p.parts.iter().filter(|part| answers(p).contains(&part.id)));
        let answered: f64 = parts.map(|part| part.points).sum();
        let cell = format!("| {} of {} |", points(answered), points(problems().map(|p| p.points).sum()));
        assert!(readme.contains(&cell), "README.md lacks {cell:?} for sections {chapter:?}");
    }
}

#[test]
fn tests_ask_no_shared_dependency_for_other_features() {
    let packages = |edges: &str| -> BTreeSet<String> {
        let arguments = ["tree", "--offline", "--locked", "--edges", edges, "--prefix", "none", "--format", "{p}|{f}"];
        let output = std::process::Command::new(env!("CARGO")).args(arguments).current_dir(root()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(|l| l.trim_end_matches(" (*)").to_string()).collect()
    };
    let (product, tests) = (packages("normal,build"), packages("normal,build,dev"));
    let twice: Vec<_> = product.difference(&tests).collect();
    assert!(twice.is_empty(), "`cargo run` and `cargo test` would each build these and their dependents: {twice:?}");
}

/// All rooms below `room`.
fn below(room: &str) -> BTreeSet<&'static str> {
    let (_, next) = ROOMS.iter().find(|(name, _)| *name == room).unwrap_or_else(|| panic!("ROOMS lacks {room:?}"));
    next.iter().flat_map(|name| below(name).into_iter().chain([*name])).collect()
}

/// The first names of the paths that follow each `prefix` in `text`: several where a list in braces follows.
fn named_after<'a>(text: &'a str, prefix: &str) -> Vec<&'a str> {
    let name = |path: &'a str| path.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).next().unwrap_or("");
    let mut names = Vec::new();
    for (at, _) in text.match_indices(prefix) {
        let path = &text[at + prefix.len()..];
        let Some(list) = path.strip_prefix('{') else {
            names.push(name(path));
            continue;
        };
        let mut depth = 0;
        for piece in list.split_inclusive(['{', ',', '}']) {
            names.extend(Some(name(piece.trim_start())).filter(|_| depth == 0));
            match piece.chars().last() {
                Some('{') => depth += 1,
                Some('}') if depth == 0 => break,
                Some('}') => depth -= 1,
                _ => {}
            }
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

#[test]
fn the_first_names_of_paths_are_found_in_lists_too() {
    let text = "use a::b::{self, c::{d, e}, f};\nuse a::g::h;\na::{i}";
    assert_eq!(named_after(text, "a::"), ["b", "g", "i"]);
    assert_eq!(named_after(text, "b::"), ["self", "c", "f"]);
}

#[test]
fn dependencies_point_down() {
    let declared = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let declared: BTreeSet<_> = named_after(&declared, "pub mod ").into_iter().collect();
    assert_eq!(declared, ROOMS.iter().map(|(name, _)| *name).collect::<BTreeSet<_>>(), "src/lib.rs and ROOMS differ");
    for room in declared {
        let (folder, allowed) = (root().join("src").join(room), below(room));
        let files = if folder.is_dir() { rust_files(&folder) } else { vec![folder.with_extension("rs")] };
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            for used in named_after(&text, "crate::") {
                assert!(used == room || allowed.contains(used), "{file:?} uses crate::{used}, not below {room}");
            }
        }
    }
}

#[test]
fn no_problem_imports_another_problem() {
    let folder = root().join("src/problems");
    let problems: BTreeSet<&str> = REGISTRY.iter().map(|problem| problem.name).collect();
    for file in rust_files(&folder).into_iter().filter(|file| *file != folder.join("mod.rs")) {
        let inside = file.strip_prefix(&folder).unwrap();
        let own = inside.iter().next().unwrap().to_string_lossy().trim_end_matches(".rs").to_string();
        assert!(problems.contains(own.as_str()), "src/problems/{} belongs to no problem", inside.display());
        let text = fs::read_to_string(&file).unwrap();
        let named = ["problems::", "super::"].into_iter().flat_map(|prefix| named_after(&text, prefix));
        let other: Vec<_> = named.filter(|name| *name != own && problems.contains(name)).collect();
        assert!(other.is_empty(), "src/problems/{} imports {other:?}: move the shared code down", inside.display());
    }
}

#[test]
fn files_follow_the_rules_of_the_house() {
    for file in ["src", "suites"].iter().flat_map(|f| rust_files(&root().join(f))) {
        let name = file.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).unwrap();
        let long = LONG.iter().any(|(path, _)| *path == name);
        assert!(long || text.lines().count() <= MAX_LINES, "{name} has {} lines", text.lines().count());
        assert!(text.starts_with("//! ") && text.len() > 5, "{name} does not begin with a module comment");
        let raw_path = name.starts_with("src/") && text.contains(".display()");
        assert!(!raw_path, "{name} calls Path::display, which prints line breaks: use printable::shown_path");
        let unsafe_room = functions::UNSAFE.iter().any(|room| name.starts_with(room));
        let code = text.lines().filter(|l| !l.trim_start().starts_with("//"));
        let is_unsafe = code.clone().any(|l| ["unsafe {", "unsafe fn", "unsafe impl"].iter().any(|u| l.contains(u)));
        assert!(unsafe_room || !is_unsafe || name == "suites/tidy.rs", "{name} holds unsafe code");
    }
}

#[test]
fn every_unsafe_block_and_function_has_a_safety_comment() {
    for file in rust_files(&root().join("src")) {
        let text = fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate().filter(|(_, line)| needs_a_safety_sentence(line)) {
            let is_note = |line: &&&str| ["//", "#["].iter().any(|start| line.trim_start().starts_with(start));
            let above = lines[..i].iter().rev().take_while(is_note).chain(&lines[i.saturating_sub(6)..=i]);
            let says_why = above.into_iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety"));
            assert!(says_why, "{}:{} has no SAFETY sentence: {line}", file.display(), i + 1);
        }
    }
}

/// Unsafe blocks, functions, traits and implementations, but not types of foreign functions.
fn needs_a_safety_sentence(line: &str) -> bool {
    let code = line.trim_start();
    let starts = ["unsafe fn", "unsafe extern \"C\" fn", "unsafe trait", "unsafe impl"];
    let item = code.trim_start_matches("pub ").trim_start_matches("pub(super) ").trim_start_matches("pub(crate) ");
    !code.starts_with("//")
        && (code.contains("unsafe {") || starts.iter().any(|start| item.starts_with(start)))
        && !item.starts_with("unsafe extern \"C\" fn(")
}

#[test]
fn lines_that_need_a_safety_comment_are_recognised() {
    for code in
        ["    let x = unsafe { y };", "pub(super) unsafe fn f() {", "unsafe impl Send for X {}", "pub unsafe trait X {"]
    {
        assert!(needs_a_safety_sentence(code), "{code}");
    }
    for code in
        ["// unsafe {", "    get: unsafe extern \"C\" fn(c_int) -> c_int,", "unsafe extern \"C\" fn(c_int) -> c_int,"]
    {
        assert!(!needs_a_safety_sentence(code), "{code}");
    }
}

/// A test that needs a GPU must be a device check, which `cs336 grade --device` runs and records. Ignored tests never run.
#[test]
fn no_test_is_ignored() {
    for file in ["src", "suites"].iter().flat_map(|folder| rust_files(&root().join(folder))) {
        let text = fs::read_to_string(&file).unwrap();
        for mark in [concat!("#[", "ignore"), concat!("with_ignored", "_flag(true)")] {
            assert!(!text.contains(mark), "{} has {mark}: make it a device check", file.display());
        }
    }
}

#[test]
fn no_committed_text_holds_a_machine_path() {
    for folder in ["src", "suites", "templates", "snapshots"] {
        let mut stack = vec![root().join(folder)];
        while let Some(path) = stack.pop() {
            if path.is_dir() {
                stack.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
                continue;
            }
            let Ok(text) = fs::read_to_string(&path) else { continue };
            // The path of a checkout in /src is a word.
            let holds_root = root().components().count() > 2 && text.contains(&*root().to_string_lossy());
            assert!(!holds_root && !text.contains(concat!("/ho", "me/")), "{} holds a machine path", path.display());
        }
    }
}

#[test]
fn every_source_file_that_the_texts_name_exists() {
    let mut texts = vec![root().join("README.md")];
    for folder in ["templates", "templates/shared", "kernels", "kernels/lib", "suites/peers", "suites/cases"] {
        texts.extend(fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    for file in texts.iter().filter(|file| file.is_file()) {
        let Ok(text) = fs::read_to_string(file) else { continue };
        let is_end = |c: char| !(c.is_ascii_alphanumeric() || "_/.".contains(c));
        for (at, _) in text.match_indices("src/") {
            let path = text[at..].split(is_end).next().unwrap().trim_end_matches('.');
            let named = path.ends_with(".rs") || path.ends_with(".cc");
            assert!(!named || root().join(path).is_file(), "{} names {path}, which does not exist", file.display());
        }
    }
}

/// Random numbers come from a `torch::Generator`: a draw from libtorch's process-wide generators, or a seed for them, would
/// change what other threads draw.
#[test]
fn nothing_draws_from_the_generators_of_the_process() {
    const FUNCTIONS: [&str; 6] = ["manual_seed(", "rand(", "randn(", "randint(", "randint_low(", "randperm("];
    const METHODS: [&str; 6] = ["rand_like(", "randn_like(", "uniform_(", "normal_(", "random_(", "bernoulli("];
    let contains = |line: &str, before: &[&str], names: &[&str]| {
        before.iter().any(|before| names.iter().any(|name| line.contains(&format!("{before}{name}"))))
    };
    let draws = |line: &str| {
        let is_code = !line.trim_start().starts_with("//");
        let function = contains(line, &["Tensor::", "Tensor::f_", "tch::"], &FUNCTIONS);
        is_code && (function || contains(line, &[".", ".f_"], &METHODS))
    };
    assert!(["tch::manual_seed(0)", "Tensor::f_randn(shape)", "x.uniform_(0.0, 1.0)"].into_iter().all(draws));
    assert!(!draws("generator.randn(shape)"));
    let own = Path::new("suites/tidy.rs");
    for file in ["src", "suites"].iter().flat_map(|folder| rust_files(&root().join(folder))) {
        let text = fs::read_to_string(&file).unwrap();
        let found = text.lines().zip(1..).find(|(line, _)| draws(line)).filter(|_| !file.ends_with(own));
        assert!(found.is_none(), "{}: {found:?} draws from the generator of the process", file.display());
    }
}
