//! Ranks as threads that meet at a store on the loopback interface.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use rstest::rstest;

use super::*;
use crate::collective::environment::LOOPBACK;

/// Longer than any wait in these tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn environment(rank: usize, world_size: usize, timeout: Duration) -> Environment {
    Environment {
        rank,
        local_rank: rank,
        world_size,
        local_world_size: world_size,
        master_addr: LOOPBACK.into(),
        master_port: 1,
        agent_store: false,
        attempt: 0,
        interface: None,
        timeout,
    }
}

fn served() -> Store {
    Store::serve(TcpListener::bind((LOOPBACK, 0)).unwrap(), PATIENCE).unwrap()
}

/// `body` as it runs at a rendezvous, without its messages.
pub fn wait<T>(environment: &Environment, body: impl FnOnce(&Arc<Waiting>) -> T) -> T {
    Waiting::during(environment, Duration::from_secs(2), drop, body)
}

fn settings(task: &str, version: &str) -> Settings {
    [("task", task), ("version", version)].map(|(name, value)| (name.to_string(), value.to_string())).to_vec()
}

fn meet_quietly(environment: &Environment, store: &Store, settings: &Settings) -> Result<Peers> {
    wait(environment, |waiting| meet(environment, store, Backend::Gloo, settings, waiting))
}

/// Rank 0's view of two ranks, and the listener of rank 1, which lives as long as that.
fn two_ranks() -> (Peers, TcpListener) {
    let [(own, listener), (other, of_other)] = [0, 1].map(|rank| Peer::here(&environment(rank, 2, PATIENCE)).unwrap());
    (Peers::new(0, vec![own, other], listener), of_other)
}

/// Every rank's outcome of `body`, each on a thread with a connection of its own.
fn on_ranks<T: Send, const N: usize>(timeout: Duration, body: impl Fn(usize, &Store) -> T + Sync) -> [T; N] {
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let _server = Store::serve(listener, timeout).unwrap();
    let body = &body;
    thread::scope(|scope| {
        let ranks: [_; N] =
            std::array::from_fn(|rank| scope.spawn(move || body(rank, &Store::join(LOOPBACK, port, timeout).unwrap())));
        ranks.map(|rank| rank.join().unwrap())
    })
}

/// The sentence with which all ranks end, if rank 2 alone has other settings and rank 3 never comes.
fn difference(of_rank_2: &Settings) -> String {
    let outcomes: [_; 3] = on_ranks(PATIENCE, |rank, store| {
        let usual = settings("naive_ddp", "0.1.0");
        let settings = if rank == 2 { of_rank_2 } else { &usual };
        meet_quietly(&environment(rank, 4, PATIENCE), store, settings).map(drop).unwrap_err().to_string()
    });
    // Rank 0 and rank 1 each compare themselves with rank 2; rank 2 meets either first.
    for (rank, said) in outcomes.iter().enumerate() {
        let names = |rank: usize| said.contains(&format!("rank {rank} on "));
        assert!(names(2) && (names(rank) || rank == 2 && (names(0) || names(1))), "rank {rank}: {said}");
    }
    outcomes.into_iter().next().unwrap()
}

#[test]
fn ranks_of_different_tasks_versions_or_precisions_end_at_once_with_field_values_and_ranks() {
    let said = difference(&settings("ddp_step", "0.1.0"));
    assert!(said.starts_with("the ranks differ in task: rank 0 on ") && said.contains(") has naive_ddp, rank 2 on "));
    assert!(said.ends_with(") has ddp_step. Start all ranks with the same task"), "{said}");
    let said = difference(&settings("naive_ddp", "0.0.9"));
    assert!(said.contains("the ranks differ in version") && said.contains("has 0.1.0") && said.contains("has 0.0.9"));
    let mut precise = settings("naive_ddp", "0.1.0");
    precise.push(("input.params.precision".into(), "\"bfloat16\"".into()));
    let said = difference(&precise);
    assert!(said.contains("differ in input.params.precision") && said.contains("has none, rank 2 on "), "{said}");
}

#[test]
fn ranks_with_different_world_sizes_are_refused() {
    let outcomes: [_; 2] = on_ranks(PATIENCE, |rank, store| {
        let same = settings("naive_ddp", "0.1.0");
        meet_quietly(&environment(rank, 2 + rank, PATIENCE), store, &same).map(drop).unwrap_err().to_string()
    });
    for said in outcomes {
        assert!(said.starts_with("the ranks differ in WORLD_SIZE: rank 0 on "), "{said}");
        assert!(said.contains(") has 2, rank 1 on ") && said.contains(") has 3. Start all ranks"), "{said}");
    }
}

#[test]
fn a_rank_of_a_version_with_another_rendezvous_is_named() {
    let store = served();
    store.set(&present(1), b"WORLD_SIZE 2 and backend gloo").unwrap();
    store.set("refused/1", b"").unwrap();
    let refused = meet_quietly(&environment(0, 2, PATIENCE), &store, &settings("naive_ddp", "0.1.0"));
    let said = refused.map(drop).unwrap_err().to_string();
    assert!(said.contains("rank 1 announces itself as another version") && said.contains("same version"), "{said}");
}

#[test]
fn a_missing_rank_and_a_duplicate_rank_are_named() {
    let timeout = Duration::from_millis(600);
    let same = settings("naive_ddp", "0.1.0");
    for rank in [0, 1] {
        // The other rank has arrived already, so that the test does not depend on thread timing.
        let (store, other) = (served(), environment(1 - rank, 3, timeout));
        assert!(meet_quietly(&other, &store, &same).is_err());
        let said = meet_quietly(&environment(rank, 3, timeout), &store, &same).map(drop).unwrap_err().to_string();
        assert!(said.starts_with("rank 2 of 3 has not arrived within 600.0 ms (CS336_DEADLINE_S)"), "{said}");
    }
    // All arrive at once, as where no launcher has set RANK, and none ends before the last.
    let outcomes: [_; 4] = on_ranks(PATIENCE, |_, store| {
        meet_quietly(&environment(0, 1, PATIENCE), store, &same).map_err(|error| error.to_string())
    });
    let refused: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(
        refused.len() == 3 && refused.iter().all(|said| said.contains("another process is rank 0 already")),
        "{refused:?}"
    );
}

#[test]
fn a_waiting_rank_says_which_ranks_it_awaits_at_which_address_and_until_when() {
    let (said, heard) = channel();
    let store = served();
    let lonely = environment(0, 3, Duration::from_millis(400));
    let say = move |sentence| said.send(sentence).unwrap();
    let outcome = Waiting::during(&lonely, Duration::from_millis(50), say, |waiting| {
        meet(&lonely, &store, Backend::Gloo, &settings("naive_ddp", "0.1.0"), waiting)
    });
    assert!(outcome.is_err());
    let heard: Vec<String> = heard.iter().collect();
    let expected = "rank 0 of 3 waits for rank 1, rank 2 at the store 127.0.0.1:1; it gives up in ";
    let last = heard.last().expect("it said nothing");
    assert!(last.starts_with(expected) && last.ends_with(" (CS336_DEADLINE_S)"), "{heard:?}");
}

#[test]
fn every_rank_gets_all_values_in_rank_order() {
    let values: [_; 2] = on_ranks(PATIENCE, |rank, store| {
        let environment = environment(rank, 2, PATIENCE);
        let peers = meet_quietly(&environment, store, &settings("naive_ddp", "0.1.0")).unwrap();
        exchange(&environment, store, &peers, "result", &[rank as u8]).unwrap()
    });
    assert_eq!(values, [vec![vec![0], vec![1]], vec![vec![0], vec![1]]]);
}

#[test]
fn a_rank_that_ended_after_its_arrival_is_named_to_its_successor_and_to_those_that_wait() {
    let same = settings("naive_ddp", "0.1.0");
    let said = |environment: &Environment, store: &Store| {
        meet_quietly(environment, store, &same).map(drop).unwrap_err().to_string()
    };
    for (ends, waits) in [(1, 0), (0, 1)] {
        // It is served by another process, as that of torchrun's agent is.
        let store = served();
        said(&environment(ends, 3, Duration::from_millis(100)), &store);
        assert_eq!(
            said(&environment(ends, 3, PATIENCE), &store),
            format!(
                "rank {ends} has been here and has ended: start all ranks anew, each with its own RANK, and a second command \
                 under a torchrun of its own"
            )
        );
        let said = said(&environment(waits, 3, PATIENCE), &store);
        let names = said.starts_with(&format!("rank {ends} on "));
        assert!(names && said.contains(") has ended while rank 2 was awaited"), "{said}");
    }
}

#[test]
fn a_rank_that_ends_while_the_others_connect_is_named() {
    let store = served();
    let (peers, other) = two_ranks();
    drop(other);
    let rank = environment(0, 2, PATIENCE);
    let outcome = wait(&rank, |waiting| join(&rank, Backend::Gloo, &store, &peers, waiting));
    let said = format!("{:#}", outcome.map(drop).unwrap_err());
    assert!(said.contains(&format!("{} has ended before all ranks had connected", peers.all()[1])), "{said}");
}

#[test]
fn a_rank_that_ended_before_its_result_is_named_with_its_host() {
    let store = served();
    let (peers, other) = two_ranks();
    drop(other);
    let outcome = exchange(&environment(0, 2, PATIENCE), &store, &peers, "result", b"0");
    assert_eq!(
        outcome.unwrap_err().to_string(),
        format!("{} has ended before it exchanged its result", peers.all()[1])
    );
}

#[test]
fn rank_0_alone_gathers_all_values() {
    let values: [_; 2] = on_ranks(PATIENCE, |rank, store| {
        let environment = environment(rank, 2, PATIENCE);
        let peers = meet_quietly(&environment, store, &settings("naive_ddp", "0.1.0")).unwrap();
        gather(&environment, store, &peers, "trace", &[rank as u8]).unwrap()
    });
    assert_eq!(values, [vec![vec![0], vec![1]], vec![]]);
}

type Collect = fn(&Environment, &Store, &Peers, &str, &[u8]) -> Result<Values>;

/// A proxy before the store that stops to answer, as a store does whose host or process is stopped.
#[rstest]
#[case::all(exchange)]
#[case::rank_0(gather)]
fn a_store_that_stops_to_answer_ends_an_exchange_at_its_deadline(#[case] collect: Collect) {
    let (listener, proxy) = [(); 2].map(|()| TcpListener::bind((LOOPBACK, 0)).unwrap()).into();
    let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
    let (of_store, of_proxy) = (port(&listener), port(&proxy));
    let _server = Store::serve(listener, PATIENCE).unwrap();
    let is_open = Arc::new(AtomicBool::new(true));
    let open = is_open.clone();
    thread::spawn(move || {
        for client in proxy.incoming() {
            let (client, store) = (client.unwrap(), TcpStream::connect((LOOPBACK, of_store)).unwrap());
            let (mut from_store, mut to_client) = (store.try_clone().unwrap(), client.try_clone().unwrap());
            let open = open.clone();
            thread::spawn(move || pass_on(&mut from_store, &mut to_client, &open));
            thread::spawn(move || std::io::copy(&mut { client }, &mut { store }));
        }
    });
    let store = Store::join(LOOPBACK, of_proxy, PATIENCE).unwrap();
    let (peers, _other) = two_ranks();
    is_open.store(false, Ordering::Relaxed);
    let outcome = collect(&environment(0, 2, Duration::from_millis(300)), &store, &peers, "result", b"0");
    let said = outcome.unwrap_err().to_string();
    assert!(
        said.contains("in vain for 300.0 ms (CS336_DEADLINE_S). Look whether the store at 127.0.0.1:1 runs"),
        "{said}"
    );
}

/// Passes bytes on as long as it is open.
fn pass_on(from: &mut TcpStream, to: &mut TcpStream, is_open: &AtomicBool) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if is_open.load(Ordering::Relaxed) && to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
}
