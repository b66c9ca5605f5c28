//! `cs336 official` with a package in place of the wheel and of pytest: its refusals, its settings, and its ends.
//! `src/python/tests/test_official.py` does the same with the installed wheel and the real pytest.

use cs336::process::processes_with;

use super::*;

/// What stands in for pytest: it writes its arguments into the checkout, and does what a conftest.py of the tests says.
const PYTEST: &str = "import os, pathlib, runpy, sys
checkout = pathlib.Path(os.environ['PYTHONPATH'].split(':')[1])
(checkout / 'arguments').write_text('\\n'.join([os.getcwd(), os.environ['PYTHONPATH'], *sys.argv]))
runpy.run_path('tests/conftest.py')
pathlib.Path('ran').write_text('1')
";

/// A checkout, and a folder of packages that stand in for the wheel and pytest.
struct Official {
    tree: Tree,
}

impl Official {
    fn new(conftest: &str) -> Self {
        let tree = Tree::new();
        for folder in ["packages/cs336", "packages/pytest", "checkout/tests", "tmp"] {
            fs::create_dir_all(tree.path(folder)).unwrap();
        }
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/python/cs336");
        for name in ["__main__.py", "official.py"] {
            fs::copy(sources.join(name), tree.path("packages/cs336").join(name)).unwrap();
        }
        for (name, text) in [
            ("packages/cs336/__init__.py", "__version__ = '0'"),
            ("packages/cs336/adapters.py", "__all__ = []"),
            ("packages/pytest/__init__.py", ""),
            ("packages/pytest/__main__.py", PYTEST),
            ("checkout/tests/adapters.py", ""),
            ("checkout/tests/test_one.py", ""),
            ("checkout/tests/conftest.py", conftest),
        ] {
            fs::write(tree.path(name), text).unwrap();
        }
        Self { tree }
    }

    fn command(&self) -> Command {
        self.command_of("checkout")
    }

    fn command_of(&self, checkout: &str) -> Command {
        let mut command = self.tree.command(&["official", checkout, "--", "-x"]);
        let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
        command
            .env("PYTHON", python)
            .env("PYTHONPATH", self.tree.path("packages"))
            .env("TMPDIR", self.tree.path("tmp"));
        command
    }

    /// The exit code, and what was said. No temporary folder and no process is left.
    fn ended(&self, output: &Output) -> (Option<i32>, String) {
        let of_this_tree = format!("CS336_ROOT={}", self.tree.folder.path().display());
        let none_left = wait_until(Duration::from_secs(60), || processes_with(&of_this_tree).is_empty());
        assert!(none_left, "a process is left: {}", output_text(output));
        assert_eq!(fs::read_dir(self.tree.path("tmp")).unwrap().count(), 0, "{}", output_text(output));
        (output.status.code(), output_text(output))
    }
}

#[test]
fn pytest_has_settings_of_its_own_in_the_copy_and_the_checkouts_path() {
    let official = Official::new("");
    fs::write(official.tree.path("checkout/pyproject.toml"), "[tool.pytest.ini_options]\npythonpath = ['lib']")
        .unwrap();
    let mut command = official.command();
    let (code, said) =
        official.ended(&command.args(["--junitxml=a.xml", "--log-file", "b.log", "-v"]).output().unwrap());
    assert!(code == Some(0) && said.contains("cs336 0 of ") && said.contains(" answers checkout/tests"), "{said}");
    let arguments = fs::read_to_string(official.tree.path("checkout/arguments")).unwrap();
    let [copy, path, _, rest @ ..] = &*arguments.lines().collect::<Vec<_>>() else { panic!("{arguments}") };
    let settings = format!("{copy}/pytest.ini");
    let own = ["-c", &settings, &format!("--rootdir={copy}"), &format!("--confcutdir={copy}"), "-p", "cs336_ran"];
    let theirs = ["-x", "--junitxml=a.xml", "--log-file", "b.log", "-v"];
    assert!(rest.starts_with(&own) && rest.ends_with(&theirs), "{arguments}");
    assert!(path.split(':').any(|folder| Path::new(folder).ends_with("checkout/lib")), "{path}");
}

#[rstest]
#[case::interrupt("INT")]
#[case::sigterm("TERM")]
#[case::hangup("HUP")]
fn an_interrupt_ends_pytest_with_all_that_it_started_and_removes_the_copy(#[case] signal: &str) {
    let hangs = "import subprocess, time\nsubprocess.Popen(['setsid', 'sleep', '3600'])\n\
        (checkout / 'hangs').touch()\ntime.sleep(3600)\n";
    let official = Official::new(&format!(
        "import os, pathlib\ncheckout = pathlib.Path(os.environ['PYTHONPATH'].split(':')[1])\n{hangs}"
    ));
    let running = official.command().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let hangs = official.tree.path("checkout/hangs");
    assert!(wait_until(Duration::from_secs(60), || hangs.exists()), "pytest was not started");
    assert!(Command::new("kill").args(["-s", signal, &running.id().to_string()]).status().unwrap().success());
    let (code, said) = official.ended(&running.wait_with_output().unwrap());
    assert_eq!(code, Some(130), "{said}");
    assert!(said.ends_with("cs336: interrupted\n") && !said.contains("Traceback"), "{said}");
}

#[rstest]
#[case::exit_0("import os\nos._exit(0)", "pytest ended with status 0 before its session did")]
#[case::a_signal("import os\nos.kill(os.getpid(), 9)", "pytest was ended by signal 9")]
fn tests_that_end_before_any_was_run_fail_with_words(#[case] conftest: &str, #[case] words: &str) {
    let official = Official::new(conftest);
    let (code, said) = official.ended(&official.command().output().unwrap());
    assert!(code == Some(1) && said.contains(words) && !said.contains("Traceback"), "{said}");
}

#[test]
fn what_is_no_file_in_the_tests_is_refused_in_a_sentence_and_never_waited_for() {
    for (name, words) in [
        ("pipe", "is no regular file, which is not copied"),
        ("test_pipe.py", "is no regular file, which is not copied"),
        ("link", "is a link, which is not copied"),
        ("loop", "is a link, which is not copied"),
        ("a\nb", "has a name that cannot be printed: rename it"),
        ("test_bytes.py", "is no Python: "),
    ] {
        let official = Official::new("");
        let path = official.tree.path("checkout/tests").join(name);
        match name {
            "link" => std::os::unix::fs::symlink("/nowhere", &path).unwrap(),
            "loop" => std::os::unix::fs::symlink(".", &path).unwrap(),
            "a\nb" | "test_bytes.py" => fs::write(&path, b"a = 1\0\xff").unwrap(),
            _ => {
                let (pipe, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
                rustix::fs::mknodat(rustix::fs::CWD, &path, pipe, mode, 0).unwrap();
            }
        }
        let (code, said) = official.ended(&official.command().output().unwrap());
        assert!(code == Some(1) && said.contains(words), "{name}: {said}");
        assert!(said.starts_with("cs336: checkout/tests/") && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn the_name_of_a_checkout_cannot_act_on_a_terminal() {
    let official = Official::new("");
    let name = "a\u{1b}[31m\nforged\u{202e}";
    fs::rename(official.tree.path("checkout"), official.tree.path(name)).unwrap();
    for tests in ["tests", "elsewhere"] {
        let (_, said) = official.ended(&official.command_of(name).output().unwrap());
        assert!(said.contains(r"a\x1b[31m\nforged\u202e"), "{said}");
        assert!(!said.contains(['\u{1b}', '\u{202e}']) && !said.contains("\nforged"), "{said}");
        fs::rename(official.tree.path(name).join(tests), official.tree.path(name).join("elsewhere")).unwrap();
    }
}

#[test]
fn a_checkout_whose_path_holds_a_colon_is_named_since_python_would_not_find_its_packages() {
    let official = Official::new("");
    fs::rename(official.tree.path("checkout"), official.tree.path("check:out")).unwrap();
    let (code, said) = official.ended(&official.command_of("check:out").output().unwrap());
    let words = "/check:out holds a colon, at which PYTHONPATH ends a path: rename or move that folder\n";
    assert!(code == Some(1) && said.ends_with(words), "{said}");
}

#[test]
fn settings_that_cannot_be_read_add_no_folder_and_an_endless_expression_is_no_python() {
    let official = Official::new("");
    let settings = official.tree.path("checkout/pyproject.toml");
    fs::write(&settings, "[tool.pytest.ini_options]\npythonpath = \"a\\u0000b lib\"").unwrap();
    let (code, said) = official.ended(&official.command().output().unwrap());
    assert!(code == Some(0) && !said.contains("Traceback"), "{said}");
    fs::File::create(&settings).unwrap().set_len(1 << 42).unwrap();
    let (code, said) = official.ended(&official.command().output().unwrap());
    assert!(code == Some(0) && !said.contains("Traceback"), "{said}");
    fs::write(official.tree.path("checkout/tests/test_two.py"), format!("x={}1", "-".repeat(100_000))).unwrap();
    let (code, said) = official.ended(&official.command().output().unwrap());
    let words = ["test_two.py is no Python: ", "nested", "check out the starter code's tests again"];
    assert!(code == Some(1) && words.iter().all(|words| said.contains(words)), "{said}");
}
