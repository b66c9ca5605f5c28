//! Faults of the machine, or of how it is set up, while a subject is graded: the subject is "not graded", and loses no points.

use std::ffi::{OsStr, OsString};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use cs336::process::confinement::Confinement;
use rustix::process::geteuid;

use super::subject::{Graded, accepted, is_confined};
use super::subject_faults::{python, through_sh};
use super::*;

const FORWARD: &str = "flash_forward";
const RANKS: &str = "ddp_overlap_individual_parameters";

/// What a grading said that graded nothing.
fn not_graded(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("not graded: ") && !said.contains("earned"), "{said}");
    said
}

/// Makes an environment without packages.
fn environment(folder: &Path) {
    fs::create_dir_all(folder.join("bin")).unwrap();
    let real = python().canonicalize().unwrap();
    symlink(&real, folder.join("bin/python")).unwrap();
    fs::write(folder.join("pyvenv.cfg"), format!("home = {}\n", real.parent().unwrap().display())).unwrap();
}

/// The packages of the tests' own environment.
fn packages() -> Vec<PathBuf> {
    let libraries = fs::read_dir(python().parent().unwrap().with_file_name("lib")).unwrap();
    libraries.map(|entry| entry.unwrap().path().join("site-packages")).collect()
}

/// Root without its right to raise limits is bound by them as others are.
#[test]
fn a_hard_limit_below_that_of_the_subject_counts_instead() {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    let arguments = [FORWARD, "--subject", folder.to_str().unwrap(), "--check", "official_protocol", "--json"];
    let as_others = if geteuid().is_root() { "setpriv --bounding-set=-sys_resource" } else { "" };
    let limited = format!("ulimit -d 8388608; exec {as_others}");
    let output = through_sh(&graded, &limited, &graded.grading(&arguments), "");
    let checks = Graded::checks(&json(&output));
    assert!(checks[0].0 == "official_protocol" && checks[0].1 == "passed", "{checks:?}");
}

#[test]
fn a_python_that_cannot_be_executed_is_named() {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    fs::create_dir_all(folder.join(".venv/bin")).unwrap();
    fs::write(folder.join(".venv/bin/python"), "").unwrap();
    let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]);
    let said = not_graded(grading.env_remove("PYTHON"));
    assert!(said.contains(".venv/bin/python: Permission denied"), "{said}");
}

#[test]
fn a_compiler_that_the_machine_lacks_costs_no_points() {
    let graded = Graded::new();
    let adapters = |module: &str| {
        format!(
            "class InvalidCxxCompiler(Exception):\n    __module__ = '{module}'\n\n\n\
             def get_flashattention_autograd_function_pytorch():\n    raise InvalidCxxCompiler('No working C++ compiler')\n"
        )
    };
    let folder = graded.add("right", "right", "tests/adapters.py", &adapters("torch._inductor.exc"));
    let grading = |file: &str| {
        let folder = folder.to_str().unwrap();
        graded.grading(&[FORWARD, "--subject", folder, "--check", "official_protocol", "--gradescope", file])
    };
    fs::write(graded.tree.path("score.json"), "of another subject").unwrap();
    let said = not_graded(&mut grading("score.json"));
    assert!(said.contains("No working C++ compiler; install what is missing"), "{said}");
    let left = fs::read_to_string(graded.tree.path("score.json")).unwrap();
    assert!(left.contains("No working C++ compiler") && left.contains("\"score\": 0.0"), "{left}");
    fs::write(folder.join("tests/adapters.py"), adapters("tests.adapters")).unwrap();
    let said = output_text(&grading("own.json").output().unwrap());
    assert!(said.contains("raises InvalidCxxCompiler") && said.contains("earned 0 of"), "{said}");
}

/// Where it could not be executed, PyTorch would look for no other one.
#[test]
fn a_subject_is_told_of_no_program_that_it_may_not_execute() {
    let graded = Graded::new();
    let told =
        "import os\nraise RuntimeError(f\"{os.environ.get('CC')} {os.environ.get('CXX')} {os.environ['PATH']}\")\n";
    let folder = graded.add("right", "right", "tests/adapters.py", told);
    let compiler = graded.tree.path("bin/c++");
    fs::create_dir(graded.tree.path("bin")).unwrap();
    fs::copy("/bin/true", &compiler).unwrap();
    let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap(), "--check", "official_protocol"]);
    let path = std::env::join_paths([compiler.parent().unwrap(), Path::new("/usr/bin")]).unwrap();
    grading.env("CC", "/usr/bin/env -S").env("CXX", &compiler).env("PATH", path);
    let said = output_text(&grading.output().unwrap());
    assert!(said.contains("raises RuntimeError") && said.contains(": /usr/bin/env -S None /usr/bin"), "{said}");
}

#[test]
fn the_products_of_a_subject_round_as_ours_do() {
    let graded = Graded::new();
    let asks = "import os, torch\n\n\nclass Asks(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, *_):\n\
                \x20       raise ValueError(f\"{os.environ['MKL_CBWR']} {torch.get_float32_matmul_precision()}\")\n\n\n\
                def get_flashattention_autograd_function_pytorch():\n    torch.set_float32_matmul_precision('medium')\n\
                \x20   return Asks\n";
    let folder = graded.write("asks", asks);
    let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap(), "--check", "official_protocol"]);
    let said = output_text(&grading.env("MKL_CBWR", "COMPATIBLE").output().unwrap());
    assert!(said.contains(": COMPATIBLE highest"), "{said}");
}

#[test]
fn a_folder_for_temporary_files_that_the_subject_may_read_is_refused() {
    let graded = Graded::new();
    let folder = graded.add("cheats", "cheats", "trick.txt", "reads_the_other_ranks");
    let temporary = folder.join("tmp");
    fs::create_dir(&temporary).unwrap();
    let mut grading = graded.grading(&[RANKS, "--subject", folder.to_str().unwrap(), "--check", "toy_model"]);
    let said = not_graded(grading.env("TMPDIR", &temporary));
    assert!(
        said.contains("/tmp/cs336-") && said.contains("which the subject can read; set TMPDIR to another"),
        "{said}"
    );
}

#[test]
fn where_a_subject_is_refused_the_files_for_graders_say_why() {
    let graded = Graded::new();
    fs::create_dir(graded.tree.path("empty")).unwrap();
    for (subject, words) in
        [("empty", "has neither tests/adapters.py nor adapters.py"), ("nowhere", "cannot be opened")]
    {
        fs::write(graded.tree.path("score.json"), "of another subject").unwrap();
        fs::write(graded.tree.path("j.xml"), "of another subject").unwrap();
        let files = ["--gradescope", "score.json", "--junit", "j.xml"];
        let said = graded.refusal(&[&[FORWARD, "--subject", subject][..], &files].concat());
        let [score, junit] = ["score.json", "j.xml"].map(|file| fs::read_to_string(graded.tree.path(file)).unwrap());
        assert!(said.contains(words) && score.contains(words) && junit.contains(words), "{said}{score}{junit}");
        assert!(score.contains("\"score\": 0.0") && junit.contains("failures=\"1\""), "{score}{junit}");
    }
}

#[test]
fn where_cases_are_not_graded_the_junit_file_says_why() {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    let cases = graded.tree.path("cases");
    fs::create_dir(&cases).unwrap();
    let names = ["attention_float32.safetensors", "attention_float32_heads.safetensors"];
    for name in names {
        fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases").join(name), cases.join(name)).unwrap();
    }
    fs::write(graded.tree.path("j.xml"), "of another subject").unwrap();
    let subject = folder.to_str().unwrap();
    let mut grading = graded.grading(&["--subject", subject, "--cases", "cases", "--junit", "j.xml"]);
    let said = not_graded(grading.env("TMPDIR", "/nowhere"));
    let left = fs::read_to_string(graded.tree.path("j.xml")).unwrap();
    assert!(said.contains("not graded: 2 of 2 cases") && left.contains("failures=\"2\""), "{said}{left}");
    assert!(names.iter().all(|name| said.contains(name) && left.contains(name)), "{said}{left}");
}

#[rstest]
#[case::for_attention(FORWARD)]
#[case::for_ranks(RANKS)]
fn a_folder_for_temporary_files_that_is_not_utf8_is_refused_with_its_name(#[case] problem: &str) {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    let temporary = graded.tree.path(OsStr::from_bytes(b"tmp\xff"));
    fs::create_dir(&temporary).unwrap();
    let mut grading = graded.grading(&[problem, "--subject", folder.to_str().unwrap()]);
    let said = not_graded(grading.env("TMPDIR", &temporary));
    assert!(said.contains("/tmp\u{fffd}/cs336-") && said.contains("is not UTF-8; set TMPDIR to a folder"), "{said}");
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
}

#[rstest]
#[case::for_attention(FORWARD)]
#[case::for_ranks(RANKS)]
fn a_python_of_ours_without_torch_is_no_fault_of_the_subject(#[case] problem: &str) {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    // An environment without packages.
    let bare = graded.tree.path("bare");
    environment(&bare);
    let mut grading = graded.grading(&[problem, "--subject", folder.to_str().unwrap()]);
    let said = not_graded(grading.env_remove("PYTHON").env("CS336_PYTHON", bare.join("bin/python")));
    assert!(said.contains("bin/python, which has none; run `make setup`, or name one"), "{said}");
}

/// A file of ours, below `suites` or in a folder of `PYTHONPATH`, with its text; without one it is missing.
#[rstest]
#[case::a_missing_file("suites/peers/subject.py", None, "peers.subject")]
#[case::a_cut_file("suites/peers/tensors.py", Some("import (\n"), "SyntaxError")]
#[case::a_torch_that_cannot_be_imported(
    "modules/typing_extensions.py",
    Some("raise ImportError('libcublas')"),
    "libcublas"
)]
fn a_damaged_file_of_ours_is_no_fault_of_the_subject(
    #[case] file: &str,
    #[case] text: Option<&str>,
    #[case] words: &str,
    #[values(FORWARD, RANKS)] problem: &str,
    #[values(false, true)] has_own_python: bool,
) {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    let mut modules = vec![graded.tree.path("modules")];
    if has_own_python {
        environment(&folder.join(".venv"));
        modules.extend(packages());
    }
    let file = graded.tree.path(file);
    fs::create_dir_all(graded.tree.path("modules")).unwrap();
    match text {
        Some(text) => fs::write(file, text).unwrap(),
        None => fs::remove_file(file).unwrap(),
    }
    let mut grading = graded.grading(&[problem, "--subject", folder.to_str().unwrap()]);
    if has_own_python {
        grading.env_remove("PYTHON").env("CS336_PYTHON", python());
    }
    let said = not_graded(grading.env("PYTHONPATH", std::env::join_paths(modules).unwrap()));
    assert!(said.contains("starting the subject's Python: ") && said.contains(words), "{said}");
    assert_eq!(said.contains("nor does ours start"), has_own_python, "{said}");
}

/// They lie in HOME, where one rank could leave some that end the Python of another before our code starts. In an environment
/// Python would not look there at all.
#[test]
fn a_subjects_python_loads_no_modules_of_a_user() {
    let graded = Graded::new();
    let folder = graded.write("asks", "import site\nraise ValueError(f'of a user: {site.ENABLE_USER_SITE}')\n");
    let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]);
    grading
        .env("PYTHON", python().canonicalize().unwrap())
        .env("PYTHONPATH", std::env::join_paths(packages()).unwrap());
    let said = output_text(&grading.output().unwrap());
    assert!(said.contains("raises ValueError (adapters.py, line 2): of a user: False"), "{said}");
}

#[test]
fn a_folder_that_goes_away_while_it_is_graded_costs_no_points() {
    let graded = Graded::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let waits = format!(
        "import pathlib, socket, time\nsocket.create_connection(('127.0.0.1', {port}))\n\
         while pathlib.Path(__file__).exists():\n    time.sleep(0.05)\nraise ValueError('it is gone')\n"
    );
    let folder = graded.write("ada", &waits);
    let moved = graded.tree.path("moved");
    let moving = std::thread::spawn({
        let folder = folder.clone();
        move || {
            accepted(&listener);
            fs::rename(folder, moved).unwrap();
        }
    });
    let said = not_graded(&mut graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]));
    moving.join().unwrap();
    assert!(said.contains("subjects/ada cannot be read; grade it again when they can"), "{said}");
}

/// A limit on processes counts threads, and does not bind root.
#[test]
fn a_guard_that_can_start_nothing_names_the_limit_and_leaves_no_sign_of_a_start() {
    let nobody = |program: &OsStr| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--clear-groups"]).arg(program);
        command
    };
    let reached = nobody("test".as_ref()).args(["-x", env!("CARGO_BIN_EXE_cs336")]).status();
    if !reached.is_ok_and(|status| status.success()) {
        eprintln!("skipped: only root can become a user without processes, who must reach the program");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    for (limit, starts) in [("--nproc=1", false), ("--core=0", true)] {
        let started: OsString = folder.path().join("started").into();
        let confinement = Confinement { read: vec!["/".into()], started: Some(started), ..Confinement::default() };
        let confined = confinement.command(env!("CARGO_BIN_EXE_cs336"), Path::new("/bin/true")).unwrap();
        let mut limited = nobody("prlimit".as_ref());
        let output = limited.arg(limit).arg(confined.get_program()).args(confined.get_args()).output().unwrap();
        let said = output_text(&output);
        assert_eq!((output.status.success(), folder.path().join("started").exists()), (starts, starts), "{said}");
        assert!(starts || said.contains("raise the limit on processes (ulimit -u)"), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

/// What of this could be done: what CUDA and NCCL do, and what looks like it.
const STARTS: &str = "
import os, socket, threading, time

threading.Thread(target=time.sleep, args=[600], daemon=True).start()
own = os.listdir('/proc/self/task')[-1]
tries = {
    'name': lambda: open(f'/proc/self/task/{own}/comm', 'w').write('cuda'),
    'memory for a rank': lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'', '\\0RANK'),
    'packets': lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(f'\\0cs336-{os.getpid()}'),
    'stream': lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    'name of the guard': lambda: open(f'/proc/{os.getppid()}/task/{os.getppid()}/comm', 'w').write('cuda'),
    'setting of the kernel': lambda: open('/proc/sys/kernel/printk', 'r+'),
}
for name, attempt in tries.items():
    try:
        attempt()
        print(name)
    except OSError:
        pass
";

#[rstest]
#[case::with_a_gpu(true, "name\nmemory for a rank\npackets\n")]
#[case::without_one(false, "")]
fn a_confined_process_may_do_what_cuda_and_nccl_do_and_no_more(#[case] with_cuda: bool, #[case] could: &str) {
    if !is_confined() {
        return;
    }
    let rank = format!("cs336-{}-{with_cuda}", std::process::id());
    let _rank = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&rank).unwrap()).unwrap();
    let confinement = Confinement { read: vec!["/".into()], with_cuda, ..Confinement::default() };
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let mut guard = confinement.command(env!("CARGO_BIN_EXE_cs336"), &python).unwrap();
    guard.args(["-c", &STARTS.replace("RANK", &rank)]);
    guard.envs(std::env::var_os("LD_LIBRARY_PATH").map(|folders| ("LD_LIBRARY_PATH", folders)));
    let output = guard.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), could, "{}", output_text(&output));
}
