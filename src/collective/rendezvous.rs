//! Rendezvous: the ranks of one run find each other at a store, and compare their settings before any backend connects.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};

use super::environment::Environment;
use super::gloo::Gloo;
use super::nccl::Nccl;
use super::{Backend, Shared};
use crate::torch::store::Store;

/// Waits for every rank of the environment's world, and forms a group of them.
///
/// # Errors
/// Names the ranks that have not arrived within the environment's timeout, or a rank with another world size or backend;
/// then the backend's own.
pub fn init_process_group(environment: &Environment, store: &Store, backend: Backend) -> Result<Shared> {
    check_in(environment, store, backend)?;
    match backend {
        Backend::Gloo => Ok(Arc::new(Gloo::connect(store, &environment.member()?)?)),
        Backend::Nccl => Ok(Arc::new(Nccl::connect(store, environment)?)),
    }
}

fn check_in(environment: &Environment, store: &Store, backend: Backend) -> Result<()> {
    let &Environment { rank, world_size, timeout, .. } = environment;
    let mine = format!("WORLD_SIZE {world_size} and backend {}", backend.name());
    ensure!(!store.has(&present(rank))?, "another process is rank {rank} already: give every process its own RANK");
    store.set(&present(rank), mine.as_bytes())?;
    for other in 0..world_size {
        let Ok(theirs) = store.get(&present(other)) else {
            let missing = (0..world_size).filter(|&other| !store.has(&present(other)).unwrap_or(false));
            let missing: Vec<_> = missing.map(|rank| rank.to_string()).collect();
            bail!(
                "rank {} of {world_size} has not arrived within {:.1} s",
                missing.join(", rank "),
                timeout.as_secs_f64()
            );
        };
        let theirs = String::from_utf8(theirs).context("another rank's settings are not UTF-8")?;
        ensure!(
            theirs == mine,
            "rank {rank} has {mine}, but rank {other} has {theirs}: start all ranks with the same settings"
        );
    }
    Ok(())
}

fn present(rank: usize) -> String {
    format!("rank/{rank}")
}

/// Gathers every rank's result at rank 0, in rank order (empty elsewhere). Returns once all results have arrived.
///
/// # Errors
/// A rank's result has not arrived within the environment's timeout.
pub fn gather_results(environment: &Environment, store: &Store, result: &[u8]) -> Result<Vec<Vec<u8>>> {
    let key = |rank: usize| format!("result/{rank}");
    store.set(&key(environment.rank), result)?;
    if environment.rank != 0 {
        // Rank 0 may serve the store that the others still use, so it must leave last.
        store.get("results")?;
        store.set(&format!("left/{}", environment.rank), b"")?;
        return Ok(Vec::new());
    }
    let results = (0..environment.world_size).map(|rank| store.get(&key(rank))).collect::<Result<Vec<_>>>()?;
    store.set("results", b"")?;
    (1..environment.world_size).try_for_each(|rank| store.get(&format!("left/{rank}")).map(drop))?;
    Ok(results)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::collective::environment::LOOPBACK;

    /// Longer than any wait in these tests.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn environment(rank: usize, world_size: usize, timeout: Duration) -> Environment {
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

    /// Both ranks' outcomes of `body`, each on a thread with a connection of its own.
    fn on_two_ranks<T: Send>(timeout: Duration, body: impl Fn(usize, &Store) -> T + Sync) -> [T; 2] {
        let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Store::serve(listener, timeout).unwrap();
        thread::scope(|scope| {
            let other = scope.spawn(|| body(1, &Store::join(LOOPBACK, port, timeout).unwrap()));
            let first = body(0, &server);
            [first, other.join().unwrap()]
        })
    }

    #[test]
    fn ranks_with_different_world_sizes_are_refused() {
        let outcomes = on_two_ranks(PATIENCE, |rank, store| {
            check_in(&environment(rank, 2 + rank, PATIENCE), store, Backend::Gloo)
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(&format!("rank {rank} has WORLD_SIZE {}", 2 + rank)), "{error}");
        }
    }

    #[test]
    fn a_missing_rank_and_a_duplicate_rank_are_named() {
        let timeout = Duration::from_millis(600);
        let store = || Store::serve(TcpListener::bind((LOOPBACK, 0)).unwrap(), timeout).unwrap();
        for rank in [0, 1] {
            // The other rank has checked in already, so that the test does not depend on thread timing.
            let (store, other) = (store(), 1 - rank);
            store.set(&present(other), b"WORLD_SIZE 3 and backend gloo").unwrap();
            let outcome = check_in(&environment(rank, 3, timeout), &store, Backend::Gloo);
            assert_eq!(outcome.unwrap_err().to_string(), "rank 2 of 3 has not arrived within 0.6 s");
        }
        let (store, alone) = (store(), environment(0, 1, timeout));
        check_in(&alone, &store, Backend::Gloo).unwrap();
        let again = check_in(&alone, &store, Backend::Gloo).unwrap_err();
        assert!(again.to_string().contains("another process is rank 0 already"));
    }

    #[test]
    fn rank_0_gathers_every_result_in_rank_order() {
        let results = on_two_ranks(PATIENCE, |rank, store| {
            gather_results(&environment(rank, 2, PATIENCE), store, &[rank as u8]).unwrap()
        });
        assert_eq!(results, [vec![vec![0], vec![1]], vec![]]);
    }
}
