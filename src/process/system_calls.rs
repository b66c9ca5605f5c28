//! Refuses a confined program the system calls that reach other processes or leave what outlives it, by a seccomp filter.
//!
//! Landlock has no rule for them: the kernel asks only whether both processes belong to the same user. The filter
//! (seccomp(2)) holds for this thread and all that it starts, and cannot be undone.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use libc::{c_long, *};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::{Eq, Gt, MaskedEq, Ne};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, apply_filter, sock_filter,
};

/// Refused with any arguments: the memory and descriptors of other processes, the order in which the kernel runs them, memory,
/// semaphores, queues and keys that stay after the last process, also those that are there, rings of requests, which no
/// filter sees, and timers whose signals make stopped processes go on.
const REFUSED: &[c_long] = &[
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_pidfd_getfd,
    SYS_process_madvise,
    SYS_sched_setattr,
    SYS_sched_setparam,
    SYS_sched_setscheduler,
    SYS_shmget,
    SYS_shmat,
    SYS_shmctl,
    SYS_semget,
    SYS_semctl,
    SYS_semop,
    SYS_semtimedop,
    SYS_msgget,
    SYS_msgctl,
    SYS_msgsnd,
    SYS_msgrcv,
    SYS_mq_open,
    SYS_mq_unlink,
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    SYS_io_uring_setup,
    SYS_timer_create,
];

/// The number of an argument, counted from 0, and what it is compared with.
type Condition = (u8, SeccompCmpOp, u64);

/// `ioprio_set(2)`: one process.
const IOPRIO_WHO_PROCESS: u64 = 1;
/// The largest nice value; a negative one, which only root may set, is larger as an unsigned number.
const NICEST: u64 = 19;

/// `fcntl(2)`: sets the signal that says that a file is ready (`asm-generic/fcntl.h`).
const F_SETSIG: u64 = 10;

/// The bits of a socket's type that are no flags.
const SOCKET_TYPE: SeccompCmpOp = MaskedEq(0xf);

/// Refused where all conditions of one of the lists hold. Only the process id 0, the caller's own process, is allowed. Sockets with
/// a path belong to services, which may run commands for any process of their user, and Landlock 6 confines only those without
/// one. `socketpair(2)` is allowed, and so are datagrams, which NCCL's ranks exchange. SIGCONT must come from the guard alone.
const REFUSED_IF: &[(c_long, &[&[Condition]])] = &[
    (SYS_prlimit64, &[&[(0, Ne, 0)]]),
    (SYS_fcntl, &[&[(1, Eq, F_SETSIG), (2, Eq, SIGCONT as u64)]]),
    (SYS_prctl, &[&[(0, Eq, PR_SET_PDEATHSIG as u64), (1, Eq, SIGCONT as u64)]]),
    (SYS_sched_setaffinity, &[&[(0, Ne, 0)]]),
    (SYS_setpriority, &[&[(0, Ne, PRIO_PROCESS as u64)], &[(1, Ne, 0)], &[(2, Gt, NICEST)]]),
    (SYS_ioprio_set, &[&[(0, Ne, IOPRIO_WHO_PROCESS)], &[(1, Ne, 0)]]),
    (SYS_migrate_pages, &[&[(0, Ne, 0)]]),
    (SYS_move_pages, &[&[(0, Ne, 0)]]),
    (SYS_socket, &[&[(0, Eq, AF_UNIX as u64), (1, SOCKET_TYPE, SOCK_STREAM as u64)]]),
];

/// As [`REFUSED_IF`]; where there is a GPU they are allowed, since CUDA does not start without them.
const REFUSED_PACKETS: (c_long, &[&[Condition]]) =
    (SYS_socket, &[&[(0, Eq, AF_UNIX as u64), (1, SOCKET_TYPE, SOCK_SEQPACKET as u64)]]);

/// Set in the numbers of system calls of x86-64's x32, which are other numbers for the same calls.
const X32: u32 = 0x4000_0000;

/// What root keeps: its access to files of other users, which Landlock bounds.
const KEPT: CapabilitySet =
    CapabilitySet::CHOWN.union(CapabilitySet::DAC_OVERRIDE).union(CapabilitySet::FOWNER).union(CapabilitySet::FSETID);

/// Refuses this thread, and what it starts, these system calls; the caller must have set `no_new_privs`, as Landlock does.
/// They fail with EPERM; a program of 32 bits is ended. `with_cuda` allows Unix sockets of packets.
///
/// # Errors
/// If the kernel has no seccomp filters.
pub fn refuse(with_cuda: bool) -> Result<()> {
    apply_filter(&filter(with_cuda)?).context("filtering system calls")
}

/// Takes from root, in what this thread executes next, the rights over the machine: its clock, devices, limits and
/// priorities. Other users have none.
pub fn drop_capabilities() -> Result<()> {
    for capability in CapabilitySet::all().difference(KEPT).iter() {
        // Fails where this kernel does not know the capability, or this process may not drop it, as it has no rights then.
        let _ = remove_capability_from_bounding_set(capability);
    }
    let sets = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { inheritable: sets.inheritable & KEPT, ..sets })?)
}

fn filter(with_cuda: bool) -> Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.iter().map(|&call| (call, Vec::new())).collect();
    let condition = |(argument, is, value): &Condition| SeccompCondition::new(*argument, Dword, is.clone(), *value);
    for (call, conditions) in REFUSED_IF.iter().chain((!with_cuda).then_some(&REFUSED_PACKETS)) {
        for all in *conditions {
            let rule = SeccompRule::new(all.iter().map(condition).collect::<Result<_, _>>()?)?;
            rules.entry(*call).or_default().push(rule);
        }
    }
    let refusal = SeccompAction::Errno(EPERM as u32);
    let target = std::env::consts::ARCH.try_into()?;
    let of_calls: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, refusal.clone(), target)?.try_into()?;
    let instruction = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    let mut program = vec![
        // The number of the call is the first field of `seccomp_data`.
        instruction(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0),
        instruction(BPF_JMP | BPF_JGE | BPF_K, 0, 1, X32),
        instruction(BPF_RET | BPF_K, 0, 0, refusal.into()),
    ];
    program.extend(of_calls);
    Ok(program)
}
