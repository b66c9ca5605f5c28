//! Ranks as threads of this process, and one test with a real process that is killed.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::slice::from_ref;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use super::*;

const HOST: &str = "127.0.0.1";
const PATIENCE: Duration = Duration::from_secs(20);

fn member(rank: usize, world_size: usize, timeout: Duration) -> Member {
    Member { rank, world_size, address: Address::Host(HOST.into()), timeout }
}

/// A served store and its port.
fn serve(timeout: Duration) -> (Store, u16) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (Store::serve(listener, timeout).unwrap(), port)
}

/// Runs `body` as every rank of a group, each on a thread; gives the results in order of rank.
fn ranks<T: Send>(world_size: usize, timeout: Duration, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let (_store, port) = serve(PATIENCE);
    // The timeout begins when all threads run: a busy machine may start them late.
    let (body, joined) = (&body, &Barrier::new(world_size));
    thread::scope(|scope| {
        let join = move |rank| {
            let store = Store::join(HOST, port, PATIENCE).unwrap();
            joined.wait();
            body(ProcessGroup::connect(&store, &member(rank, world_size, timeout)).unwrap())
        };
        let handles: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || join(rank))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

fn all_reduce(group: &ProcessGroup, tensors: &[Tensor], op: ReduceOp) -> Result<()> {
    group.all_reduce_async(tensors, op)?.wait(PATIENCE)
}

fn all_gather(group: &ProcessGroup, input: &Tensor) -> Vec<Tensor> {
    let output = Tensor::zeros([group.world_size as i64, input.numel() as i64], (input.kind(), Device::Cpu));
    group.all_gather_async(&[output.shallow_clone()], from_ref(input)).unwrap().wait(PATIENCE).unwrap();
    output.unbind(0)
}

fn reduce_scatter(group: &ProcessGroup, input: &Tensor, op: ReduceOp) -> Result<Tensor> {
    let mut shape = input.size();
    shape[0] /= group.world_size as i64;
    let output = Tensor::zeros(&shape, (input.kind(), Device::Cpu));
    group.reduce_scatter_async(&[output.shallow_clone()], from_ref(input), op)?.wait(PATIENCE)?;
    Ok(output)
}

fn tensor(values: &[f64], kind: Kind) -> Tensor {
    Tensor::from_slice(values).to_kind(kind)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).view([-1])).unwrap()
}

#[test]
fn all_collectives_give_the_right_values_for_every_kind() {
    // Small whole numbers are exact in every kind.
    ranks(3, PATIENCE, |group| {
        let rank = group.rank as f64;
        assert_eq!(group.world_size, 3);
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half, Kind::Int64] {
            let mine = || tensor(&[rank, 10.0 * rank], kind);
            let summed = mine();
            all_reduce(&group, &[summed.shallow_clone()], ReduceOp::Sum).unwrap();
            assert_eq!(values(&summed), [3.0, 30.0], "{kind:?}");
            let sent = mine();
            group.broadcast_async(&sent, 2).unwrap().wait(PATIENCE).unwrap();
            assert_eq!(values(&sent), [2.0, 20.0], "{kind:?}");
            let gathered: Vec<_> = all_gather(&group, &mine()).iter().map(values).collect();
            assert_eq!(gathered, [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]], "{kind:?}");
            let rows = tensor(&[rank, 1.0, 2.0 * rank, 2.0, 3.0 * rank, 3.0], kind).view([3, 2]);
            let share = reduce_scatter(&group, &rows, ReduceOp::Sum).unwrap();
            assert_eq!(share.size(), [1, 2]);
            assert_eq!(values(&share), [3.0 * (rank + 1.0), 3.0 * (rank + 1.0)], "{kind:?}");
            if kind != Kind::Int64 {
                let mean = mine();
                all_reduce(&group, &[mean.shallow_clone()], ReduceOp::Average).unwrap();
                assert_eq!(values(&mean), [1.0, 10.0], "{kind:?}");
                let share = reduce_scatter(&group, &rows, ReduceOp::Average).unwrap();
                assert_eq!(values(&share), [rank + 1.0, rank + 1.0], "{kind:?}");
            }
        }
        group.barrier_async().unwrap().wait(PATIENCE).unwrap();
    });
}

#[test]
fn coalesced_tensors_are_reduced_independently() {
    ranks(2, PATIENCE, |group| {
        let rank = group.rank as f64;
        let tensors = [tensor(&[rank], Kind::Float), tensor(&[1.0, rank, 2.0], Kind::Float)];
        all_reduce(&group, &tensors, ReduceOp::Sum).unwrap();
        assert_eq!(values(&tensors[0]), [1.0]);
        assert_eq!(values(&tensors[1]), [2.0, 1.0, 4.0]);
    });
}

#[test]
fn asynchronous_works_can_be_waited_for_in_any_order() {
    ranks(2, PATIENCE, |group| {
        let rank = group.rank as f64;
        let tensors: Vec<_> = (0..8).map(|i| tensor(&[rank + f64::from(i)], Kind::Float)).collect();
        let start = |tensor: &Tensor| group.all_reduce_async(&[tensor.shallow_clone()], ReduceOp::Average).unwrap();
        let mut work: Vec<Work> = tensors.iter().map(start).collect();
        let gathered = tensor(&[-1.0, -1.0], Kind::Int64);
        let mut gather = group.all_gather_async(from_ref(&gathered), &[tensor(&[rank], Kind::Int64)]).unwrap();
        for work in work.iter_mut().rev() {
            work.wait(PATIENCE).unwrap();
            // Waiting twice does not divide twice.
            work.wait(PATIENCE).unwrap();
        }
        gather.wait(PATIENCE).unwrap();
        assert_eq!(values(&gathered), [0.0, 1.0]);
        for (i, tensor) in tensors.iter().enumerate() {
            assert_eq!(values(tensor), [0.5 + i as f64]);
        }
    });
}

#[test]
fn a_parameter_that_requires_a_gradient_can_be_averaged() {
    ranks(2, PATIENCE, |group| {
        let parameter = tensor(&[group.rank as f64], Kind::Float).set_requires_grad(true);
        all_reduce(&group, &[parameter.shallow_clone()], ReduceOp::Average).unwrap();
        assert_eq!(values(&parameter.detach()), [0.5]);
        assert!(parameter.requires_grad() && parameter.is_leaf());
    });
}

#[test]
fn misuse_is_refused_before_anything_is_sent() {
    ranks(2, PATIENCE, |group| {
        let floats = Tensor::zeros([4, 4], (Kind::Float, Device::Cpu));
        let message = |result: Result<()>| format!("{:#}", result.unwrap_err());
        assert!(message(all_reduce(&group, &[], ReduceOp::Sum)).contains("no tensors"));
        assert!(message(all_reduce(&group, &[floats.slice(1, 0, 2, 1)], ReduceOp::Sum)).contains("contiguous"));
        assert!(message(all_reduce(&group, &[floats.to_kind(Kind::Int64)], ReduceOp::Average)).contains("Int64"));
        assert!(message(group.broadcast_async(&floats, 2).map(drop)).contains("rank 2 of 2"));
        assert!(
            message(reduce_scatter(&group, &floats.slice(0, 0, 3, 1), ReduceOp::Sum).map(drop))
                .contains("12 elements are not 2 shares of 4")
        );
        group.barrier_async().unwrap().wait(PATIENCE).unwrap();
    });
}

#[test]
fn a_missing_rank_causes_a_timeout_after_which_the_group_can_be_dropped() {
    let timeout = Duration::from_secs(2);
    let rank_0_is_done = Barrier::new(2);
    let done = ranks(2, timeout, |group| {
        if group.rank == 1 {
            rank_0_is_done.wait();
            return None;
        }
        let tensor = Tensor::ones([4], (Kind::Float, Device::Cpu));
        let mut work = group.all_reduce_async(&[tensor.shallow_clone()], ReduceOp::Sum).unwrap();
        let early = work.wait(Duration::from_millis(50)).unwrap_err();
        assert!(format!("{early:#}").contains("timed out"), "{early:#}");
        let error = format!("{:#}", work.wait(PATIENCE).unwrap_err());
        drop(group);
        rank_0_is_done.wait();
        Some(error)
    });
    let error = done[0].as_ref().unwrap();
    assert!(error.starts_with("all-reduce, rank 0 of 2: "), "{error}");
    assert!(error.contains("Timed out waiting 2000ms"), "{error}");
}

#[test]
fn connecting_without_a_peer_fails_within_the_timeout() {
    let timeout = Duration::from_millis(800);
    for rank in [0, 1] {
        let (store, _) = serve(PATIENCE);
        let error = format!("{:#}", ProcessGroup::connect(&store, &member(rank, 2, timeout)).err().unwrap());
        assert!(error.starts_with(&format!("rank {rank} of 2 connecting to its peers")), "{error}");
        assert!(error.contains("800ms"), "{error}");
    }
}

#[test]
fn works_end_in_call_order_and_notify_before_their_waiter_returns() {
    ranks(2, PATIENCE, |group| {
        let ended = Arc::new(Mutex::new(Vec::new()));
        let tensors: Vec<_> = (0..4).map(|i| Tensor::ones([1 << (16 - 4 * i)], (Kind::Float, Device::Cpu))).collect();
        let start = |(i, tensor): (usize, &Tensor)| {
            let work = group.all_reduce_async(&[tensor.shallow_clone()], ReduceOp::Sum).unwrap();
            let ended = ended.clone();
            work.when_done(move || ended.lock().unwrap().push(i)).unwrap();
            work
        };
        let mut works: Vec<Work> = tensors.iter().enumerate().map(start).collect();
        works.pop().unwrap().wait(PATIENCE).unwrap();
        assert_eq!(*ended.lock().unwrap(), [0, 1, 2, 3]);
    });
}

#[test]
fn the_device_thread_has_the_batch_policy_and_the_callers_policy_is_unchanged() {
    /// `SCHED_BATCH`, and the place of a thread's policy after its name (proc_pid_stat(5): fields 3 and 41).
    const BATCH: &str = "3";
    const POLICY: usize = 41 - 3;
    let policy = |thread: &Path| {
        let stat = std::fs::read_to_string(thread.join("stat")).ok()?;
        Some(stat.rsplit_once(") ")?.1.split(' ').nth(POLICY)?.to_string())
    };
    let before = policy(Path::new("/proc/thread-self")).unwrap();
    let of_rank = ranks(2, PATIENCE, |_group| {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let policies: Vec<_> = threads.filter_map(|thread| policy(&thread.unwrap().path())).collect();
        (policy(Path::new("/proc/thread-self")).unwrap(), policies)
    });
    for (own, policies) in of_rank {
        assert_eq!(own, before);
        // A user who chose another policy for the whole process keeps it.
        assert!(before != "0" || policies.iter().any(|policy| policy == BATCH), "{policies:?}");
    }
}

#[test]
fn a_killed_peer_process_causes_an_error_after_which_the_group_can_be_dropped() {
    const PORT: &str = "CS336_TEST_GLOO_PORT";
    const NAME: &str = "torch::gloo::tests::a_killed_peer_process_causes_an_error_after_which_the_group_can_be_dropped";
    let one = Tensor::ones([1 << 10], (Kind::Float, Device::Cpu));
    if let Ok(port) = std::env::var(PORT) {
        // This is the peer: it takes part once and then only waits to be killed.
        let store = Store::join(HOST, port.parse().unwrap(), PATIENCE).unwrap();
        let group = ProcessGroup::connect(&store, &member(1, 2, PATIENCE)).unwrap();
        all_reduce(&group, &[one.shallow_clone()], ReduceOp::Sum).unwrap();
        thread::sleep(3 * PATIENCE);
        return;
    }
    let (store, port) = serve(PATIENCE);
    let mut peer = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME])
        .env(PORT, port.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let group = ProcessGroup::connect(&store, &member(0, 2, PATIENCE)).unwrap();
    all_reduce(&group, &[one.shallow_clone()], ReduceOp::Sum).unwrap();
    assert_eq!(one.double_value(&[0]), 2.0);
    let mut under_way = group.all_reduce_async(&[one.shallow_clone()], ReduceOp::Sum).unwrap();
    peer.kill().unwrap();
    peer.wait().unwrap();
    let error = format!("{:#}", under_way.wait(PATIENCE).unwrap_err());
    // A closed connection is reported immediately, not at the timeout.
    assert!(error.contains("onnection") && !error.contains("imed out"), "{error}");
    assert!(all_reduce(&group, &[one.shallow_clone()], ReduceOp::Sum).is_err());
    drop(group);
}
