//! Subjects that attack processes beside their own, or try to outlive their grading.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;

use cs336::process::ChildProcess;
use cs336::process::confinement::Confinement;
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::subject::{Graded, accepted, is_confined};
use super::*;

const FORWARD: &str = "flash_forward";

/// What a subject's import says that it could do: each line of `tries` is a name and an expression that must raise.
const TRIES: &str = "
import ctypes, errno, fcntl, os, resource, signal, socket, stat

libc = ctypes.CDLL(None, use_errno=True)
above, other = os.getppid(), os.fork()
if other == 0:
    os.read(os.pipe()[0], 1)
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]

def call(number, *arguments):
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def made(identifier, remove):
    if identifier < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    remove(identifier)

def allowed(number):
    # With wrong arguments, or unknown to this kernel, it fails otherwise.
    try:
        call(number, 0, 0)
    except PermissionError:
        raise
    except OSError:
        pass

def existing(name, *arguments):
    ctypes.set_errno(0)
    getattr(libc, name)(*arguments)
    # The C library says EACCES where mq_unlink may not be called.
    if ctypes.get_errno() in (errno.EPERM, errno.EACCES):
        raise PermissionError('refused, whatever the object is')

def ask(kind):
    with socket.socket(socket.AF_UNIX, kind) as service:
        if kind & 0xf == socket.SOCK_STREAM:
            service.connect('SERVICE')

def sockets():
    for kind in socket.SOCK_STREAM, socket.SOCK_SEQPACKET:
        socket.socketpair(type=kind)
    for family, kind in (socket.AF_UNIX, socket.SOCK_DGRAM), (socket.AF_INET, socket.SOCK_STREAM):
        socket.socket(family, kind).close()

def rights():
    status = open('/proc/self/status').read()
    if not int(status.partition('CapEff:')[2].split()[0], 16) & ~0b11011:
        raise PermissionError('none beyond those over files')

def environments():
    pid = above
    while pid > 1:
        try:
            if b'NOBODY_ELSES=' in open(f'/proc/{pid}/environ', 'rb').read():
                return
        except PermissionError:
            pass
        pid = int(open(f'/proc/{pid}/stat').read().rpartition(') ')[2].split()[1])
    raise PermissionError('no process above has it')

tries = {
    'environments': environments,
    'limit': lambda: resource.prlimit(above, resource.RLIMIT_CORE, (0, 0)),
    'limit of a child': lambda: resource.prlimit(other, resource.RLIMIT_CORE, (0, 0)),
    'cores': lambda: os.sched_setaffinity(above, os.sched_getaffinity(above)),
    'priority': lambda: os.setpriority(os.PRIO_PROCESS, above, os.getpriority(os.PRIO_PROCESS, above)),
    'priority of all': lambda: os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_USER, 0)),
    'scheduler': lambda: os.sched_setscheduler(above, os.SCHED_OTHER, os.sched_param(0)),
    'real time': lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    'disk priority': lambda: libc.syscall(251 if os.uname().machine == 'x86_64' else 30, 1, above, 16388) and 1 / 0,
    'shared memory': lambda: made(libc.shmget(0, 4096, 0o1600), lambda it: libc.shmctl(it, 0, None)),
    'message queue': lambda: made(libc.msgget(0, 0o1600), lambda it: libc.msgctl(it, 0, None)),
    'semaphores': lambda: made(libc.semget(0, 1, 0o1600), lambda it: libc.semctl(it, 0, 0)),
    'posix queue': lambda: made(libc.mq_open(b'/cs336', os.O_CREAT, 0o600, None), lambda it: libc.mq_unlink(b'/cs336')),
    'memory that exists': lambda: existing('shmat', -1, None, 0),
    'list of memory': lambda: existing('shmctl', 0, 14, None),
    'semaphores that exist': lambda: existing('semctl', -1, 0, 0),
    'waiting for a semaphore': lambda: existing('semop', -1, None, 1),
    'queue that exists': lambda: existing('msgctl', -1, 0, None),
    'sending to a queue': lambda: existing('msgsnd', -1, b'12345678', 0, 0),
    'reading from a queue': lambda: existing('msgrcv', -1, b'12345678', 0, 0, 0),
    'removing a posix queue': lambda: existing('mq_unlink', b'/cs336-of-nobody'),
    'trace': lambda: made(libc.ptrace(16, other, 0, 0), print),
    'device': lambda: os.mknod(os.environ['TMPDIR'] + '/memory', 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
    # getpid of x32
    'x32': lambda: allowed(0x40000000 | 39) if os.uname().machine == 'x86_64' else 1 / 0,
    'ring': lambda: allowed(425),
    'timer': lambda: allowed(222 if os.uname().machine == 'x86_64' else 107),
    'waking by a file': lambda: fcntl.fcntl(0, 10, signal.SIGCONT),
    'waking by an end': lambda: existing('prctl', 1, int(signal.SIGCONT), 0, 0, 0),
    'service': lambda: ask(socket.SOCK_STREAM),
    'service at once': lambda: ask(socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC),
    'service of packets': lambda: ask(socket.SOCK_SEQPACKET),
    'rights': rights,
    'own limit': lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 0)),
    'own cores': lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    'own priority': lambda: os.setpriority(os.PRIO_PROCESS, 0, 19),
    'own pipe': lambda: os.mkfifo(os.environ['TMPDIR'] + '/pipe'),
    'own sockets': sockets,
}
can = []
for name, attempt in tries.items():
    try:
        attempt()
        can.append(name)
    except (OSError, ZeroDivisionError):
        pass
os.kill(other, 9)
raise RuntimeError(f'can: {can}')
";

#[test]
fn a_subject_reaches_no_process_but_its_own_and_leaves_nothing_in_the_kernel() {
    if !is_confined() {
        return;
    }
    let graded = Graded::new();
    // Any program of this user that listens there, and would do what it is asked.
    let path = graded.tree.path("service");
    let service = UnixListener::bind(&path).unwrap();
    service.set_nonblocking(true).unwrap();
    let folder = graded.write("reaches", &TRIES.replace("SERVICE", path.to_str().unwrap()));
    let arguments = [FORWARD, "--subject", folder.to_str().unwrap(), "--check", "official_protocol"];
    let said = output_text(&graded.grading(&arguments).env("NOBODY_ELSES", "secret").output().unwrap());
    assert!(said.contains("can: ['own limit', 'own cores', 'own priority', 'own pipe', 'own sockets']"), "{said}");
    assert!(said.contains("confined to its folder"), "{said}");
    assert!(service.accept().is_err(), "somebody has asked the service");
}

/// Two processes without the subject's group, session and parents, one also without its environment; one forks without end.
const DETACHES: &str = "
import ctypes, os, socket, time

def detach(work):
    begun, begins = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        connection = socket.create_connection(('127.0.0.1', PORT))
        os.set_inheritable(connection.fileno(), True)
        # PR_SET_DUMPABLE: only root may look at it.
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        os.write(begins, b'.')
        for descriptor in set(range(100)) - {connection.fileno()}:
            try:
                os.close(descriptor)
            except OSError:
                pass
        work()
        os._exit(0)
    os.read(begun, 1)

def forks():
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)

detach(lambda: os.execve('/bin/sleep', ['sleep', '600'], {}))
detach(forks)
";

#[rstest]
#[case::its_grading("raise ValueError('the end')", false)]
#[case::a_grader_that_is_killed("time.sleep(3600)", true)]
fn no_process_of_a_subject_outlives(#[case] last_line: &str, #[case] is_killed: bool) {
    let graded = Graded::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let folder = graded.write("detaches", &format!("{}{last_line}\n", DETACHES.replace("PORT", &port)));
    let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap(), "--check", "official_protocol"]);
    let mut grading = grading.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut connections: Vec<TcpStream> = Vec::new();
    wait_until(Duration::from_secs(120), || {
        connections.extend(listener.accept().ok().map(|(connection, _)| connection));
        connections.len() == 2
    });
    assert_eq!(connections.len(), 2);
    if is_killed {
        kill_process(Pid::from_child(&grading), Signal::KILL).unwrap();
    }
    grading.wait().unwrap();
    for mut connection in connections {
        connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let read = connection.read(&mut [0]);
        assert!(matches!(read, Ok(0)), "a process still holds its connection: {read:?}");
    }
}

/// Shared memory of two kinds, of 1.25 GiB each, in a process whose name is not UTF-8.
const SHARES: &str = r"
import ctypes, mmap, os, threading, time

libc = ctypes.CDLL(None)
libc.prctl(15, b'\xff', 0, 0, 0)

def share():
    size, page = 5 << 28, bytes(1 << 20)
    file = os.memfd_create('shared')
    os.ftruncate(file, size)
    shared = [mmap.mmap(-1, size), mmap.mmap(file, size)]
    for at in range(0, size, len(page)):
        for memory in shared:
            memory[at : at + len(page)] = page
    time.sleep(3600)

";

#[rstest]
#[case::of_the_first_thread("share()\n")]
#[case::of_a_thread_that_outlives_it(
    "threading.Thread(target=share).start()\nlibc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)\n"
)]
fn shared_memory_counts_towards_the_limit_on_memory(#[case] begins: &str) {
    let graded = Graded::new();
    let folder = graded.write("shares", &format!("{SHARES}{begins}"));
    let arguments = [FORWARD, "--subject", folder.to_str().unwrap(), "--memory", "2", "--check", "official_protocol"];
    let said = output_text(&graded.grading(&arguments).output().unwrap());
    assert!(said.contains("a process had more than 2 GiB of memory with what it shares"), "{said}");
}

/// A process in a session of its own that holds a connection to PORT, and then 640 MiB of shared memory.
const OUTGROWS: &str = "
import mmap, os, socket, time

begun, begins = os.pipe()
if os.fork() == 0:
    os.setsid()
    connection = socket.create_connection(('127.0.0.1', PORT))
    os.write(begins, b'.')
    time.sleep(600)
os.read(begun, 1)
shared = mmap.mmap(-1, 640 << 20)
for at in range(0, len(shared), mmap.PAGESIZE):
    shared[at] = 1
time.sleep(600)
";

/// The guard prints why it ends what it guards, to a pipe that this can fill and make block or not.
#[rstest]
#[case::that_blocks(false)]
#[case::that_does_not_block(true)]
fn no_pipe_without_room_keeps_a_guard_from_ending_what_it_guards(#[case] is_nonblocking: bool) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let (_unread, mut pipe) = std::io::pipe().unwrap();
    ioctl_fionbio(&pipe, true).unwrap();
    while pipe.write(&[0; 4096]).is_ok() {}
    ioctl_fionbio(&pipe, is_nonblocking).unwrap();
    let confinement = Confinement { read: vec!["/".into()], memory_bytes: Some(512 << 20), ..Confinement::default() };
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let mut guard = confinement.command(env!("CARGO_BIN_EXE_cs336"), &python).unwrap();
    guard.args(["-c", &OUTGROWS.replace("PORT", &port)]);
    guard.envs(std::env::var_os("LD_LIBRARY_PATH").map(|folders| ("LD_LIBRARY_PATH", folders)));
    guard.stdin(Stdio::null()).stdout(pipe.try_clone().unwrap()).stderr(pipe);
    let mut guard = guard.spawn().unwrap();
    let mut connection = accepted(&listener);
    let read = connection.read(&mut [0]);
    let has_ended = wait_until(Duration::from_secs(60), || guard.try_wait().unwrap().is_some());
    let _ = guard.kill();
    assert!(matches!(read, Ok(0)) && has_ended, "{read:?}, and the guard ends: {has_ended}");
}

/// A chain of processes that nobody waits for, each of a name that is not UTF-8, which send to PORT without end.
const BEATS: &str = r"
import ctypes, os, signal, socket, threading, time

libc = ctypes.CDLL(None)
libc.prctl(15, b'\xff', 0, 0, 0)
libc.prctl(36, 1, 0, 0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
connection = socket.create_connection(('127.0.0.1', PORT))
connection.send(b'%d\n' % os.getpgrp())
if os.fork():
    # What it has started is found also after its first thread has ended.
    threading.Thread(target=time.sleep, args=[600]).start()
    libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)
while True:
    for _ in range(100):
        connection.send(b'.')
    if os.fork():
        os._exit(0)
";

#[rstest]
#[case::undisturbed(None)]
#[case::that_runs_on(Some(Signal::CONT))]
#[case::that_ran_and_stopped_again(Some(Signal::STOP))]
fn what_is_stopped_for_the_turns_of_others_computes_nothing_unseen(#[case] last: Option<Signal>) {
    if !is_confined() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let confinement = Confinement { read: vec!["/".into()], ..Confinement::default() };
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    let mut command = confinement.command(env!("CARGO_BIN_EXE_cs336"), &python).unwrap();
    command.args(["-c", &BEATS.replace("PORT", &listener.local_addr().unwrap().port().to_string())]);
    command.envs(std::env::var_os("LD_LIBRARY_PATH").map(|folders| ("LD_LIBRARY_PATH", folders)));
    let mut child = ChildProcess::start(command).unwrap();
    let mut connection = accepted(&listener);
    let group = Pid::from_raw(BufReader::new(&connection).lines().next().unwrap().unwrap().parse().unwrap()).unwrap();
    connection.set_nonblocking(true).unwrap();
    let mut beats = || std::iter::from_fn(|| connection.read(&mut [0; 4096]).ok()).sum::<usize>();
    for _ in 0..3 {
        assert!(wait_until(Duration::from_secs(60), || beats() > 0), "it does not compute in its turn");
        assert!(child.stop(), "it does not stop");
        beats();
        match last {
            Some(last) => {
                let mut seen = 0;
                // The guard may stop it before it computes. A hundred beats are those of another process.
                let computes = wait_until(Duration::from_secs(60), || {
                    kill_process_group(group, Signal::CONT).unwrap();
                    std::thread::sleep(Duration::from_millis(100));
                    seen += beats();
                    seen > 200
                });
                assert!(computes, "it does not go on in the turn of another");
                kill_process_group(group, last).unwrap();
                beats();
            }
            None => {
                std::thread::sleep(Duration::from_millis(300));
                assert_eq!(beats(), 0, "in the turn of another");
            }
        }
        assert_eq!(child.go_on(), last.is_none(), "it is not said whether it ran");
    }
}
