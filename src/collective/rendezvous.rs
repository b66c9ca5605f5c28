//! Rendezvous: the ranks of one run find each other at a store, and compare their settings before any backend connects.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};

use super::environment::{DEADLINE, Environment};
use super::gloo::Gloo;
use super::nccl::Nccl;
use super::network::PAUSE;
use super::peers::{Peer, Peers};
use super::waiting::{INTERVAL, Waiting, say};
use super::{Backend, Shared};
use crate::cuda::make_current;
use crate::printable::first_few;
use crate::process::{remedy_for_limit, wait_until};
use crate::torch::store::Store;
use crate::units::human_seconds;

/// What all ranks must have equal: names and values, as a message prints them.
pub type Settings = Vec<(String, String)>;

/// What a rank writes to the store when it arrives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Arrival {
    peer: Peer,
    settings: Settings,
}

/// How long rank 0, which may serve the store, stays for the others to read why it ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// Waits for every rank of the environment's world, and compares their settings. Says every 10 s on standard error what is
/// awaited.
///
/// # Errors
/// Names the store that cannot be reached or the ranks that have not arrived within the environment's timeout; or, on every
/// rank, the setting that differs, with both values and both ranks.
pub fn arrive(environment: &Environment, backend: Backend, settings: &Settings) -> Result<(Store, Peers)> {
    environment.require_interface()?;
    Waiting::during(environment, INTERVAL, say, |waiting| {
        let (environment, settings) = (environment.clone(), settings.clone());
        let remedy = "Look whether rank 0 runs, and correct MASTER_ADDR and MASTER_PORT";
        waiting.bounded(
            remedy,
            || Ok(()),
            move |waiting| {
                let store = environment.store(waiting)?;
                let peers = meet(&environment, &store, backend, &settings, waiting)?;
                Ok((store, peers))
            },
        )
    })
}

/// Forms the group of all ranks. Says every 10 s on standard error what is awaited.
///
/// # Errors
/// The backend's, after the ranks that have ended or cannot be reached; a rank that ends meanwhile; ranks that have not
/// connected within the environment's timeout.
pub fn connect(environment: &Environment, backend: Backend, store: &Store, peers: &Peers) -> Result<Shared> {
    Waiting::during(environment, INTERVAL, say, |waiting| join(environment, backend, store, peers, waiting))
}

fn join(
    environment: &Environment,
    backend: Backend,
    store: &Store,
    peers: &Peers,
    waiting: &Arc<Waiting>,
) -> Result<Shared> {
    waiting.set(connections(backend, &peers.names_of_others()));
    let remedy = opening(backend);
    let look = || match first_ended(environment.rank, peers.all().iter()) {
        Some(ended) => bail!("{ended} before all ranks had connected. If it does not say why: {remedy}"),
        None => Ok(()),
    };
    let group = form(environment, backend, store.under("group")?, peers.own(), look, waiting);
    let group = group.map_err(|error| peers.explain(error))?;
    peers.connected();
    Ok(group)
}

/// Forms a group of two ranks of the run, of which this is one.
///
/// # Errors
/// The backend's; a rank that has not connected within the environment's timeout.
pub fn connect_pair(
    environment: &Environment,
    backend: Backend,
    store: &Store,
    peers: &Peers,
    [one, other]: [usize; 2],
) -> Result<Shared> {
    let is_other = environment.rank == other;
    let theirs = &peers.all()[if is_other { one } else { other }];
    let member = Environment { rank: is_other.into(), world_size: 2, ..environment.clone() };
    let store = store.under(&format!("pair/{one}_{other}"))?;
    Waiting::during(environment, INTERVAL, say, |waiting| {
        waiting.set(connections(backend, &theirs.to_string()));
        form(&member, backend, store, peers.own(), || Ok(()), waiting)
    })
}

fn connections(backend: Backend, others: &str) -> String {
    format!("{} connections with {others}", backend.name())
}

/// How ranks that cannot connect reach each other.
pub fn opening(backend: Backend) -> &'static str {
    match backend {
        Backend::Gloo => "Open all ports between these hosts, or name their network in GLOO_SOCKET_IFNAME",
        Backend::Nccl => "Open all ports between these hosts, or name their network in NCCL_SOCKET_IFNAME",
    }
}

/// Forms the group that `environment` describes; this rank's peers reach it as `own`.
fn form(
    environment: &Environment,
    backend: Backend,
    store: Store,
    own: &Peer,
    look: impl Fn() -> Result<()>,
    waiting: &Arc<Waiting>,
) -> Result<Shared> {
    let remedy = opening(backend);
    let (environment, address) = (environment.clone(), own.address.ip());
    let group = waiting.bounded(remedy, look, move |_| -> Result<Shared> {
        Ok(match backend {
            Backend::Gloo => {
                let group = Gloo::connect(&store, &environment.member(address));
                let words = |error: &Error| match remedy_for_limit(error) {
                    Some(limit) => format!("{error:#}; {limit}"),
                    None => format!("{error:#}. {remedy}"),
                };
                Arc::new(group.map_err(|error| anyhow!(words(&error)))?)
            }
            Backend::Nccl => Arc::new(Nccl::connect(&store, &environment)?),
        })
    })?;
    if group.device().is_cuda() {
        // The thread that formed the group has ended.
        make_current(group.device())?;
    }
    Ok(group)
}

/// The beginning of a sentence about the first of `peers` that has ended. Rank 0 looks at all, and they at rank 0, without which
/// none goes on: a look fills the queue of its peer's listener.
fn first_ended<'a>(own: usize, peers: impl Iterator<Item = &'a Peer>) -> Option<String> {
    let mut looked_at = peers.filter(|peer| peer.rank != own && (own == 0 || peer.rank == 0));
    looked_at.find_map(|peer| Some(format!("{peer} {}", peer.ended()?)))
}

/// Waits until all ranks have arrived, and compares their settings with this rank's.
fn meet(
    environment: &Environment,
    store: &Store,
    backend: Backend,
    settings: &Settings,
    waiting: &Waiting,
) -> Result<Peers> {
    let &Environment { rank, world_size, timeout, ref master_addr, master_port, .. } = environment;
    let setting = |name: &str, value: String| (name.to_string(), value);
    let own = [setting("WORLD_SIZE", world_size.to_string()), setting("backend", backend.name().into())];
    let (peer, listener) = Peer::here(environment)?;
    let mine = Arrival { peer, settings: own.into_iter().chain(settings.iter().cloned()).collect() };
    if !store.claim(&format!("claimed/{rank}"))? {
        return Err(taken(store, rank)?);
    }
    store.set(&present(rank), &serde_json::to_vec(&mine)?)?;
    let lost = || format!("rank {rank} has lost rank 0's store at {master_addr}:{master_port}; look why rank 0 ended");
    let mut arrived: Vec<Option<Arrival>> = vec![None; world_size];
    let mut looked = Instant::now();
    loop {
        // Before the reads: a rank that ended for a difference has left it in the store.
        let look = || first_ended(rank, arrived.iter().flatten().map(|arrival| &arrival.peer));
        let ended = waiting.is_due(&mut looked).then(look).flatten();
        for (other, arrival) in arrived.iter_mut().enumerate().filter(|(_, arrival)| arrival.is_none()) {
            if let Some(bytes) = announced(store, other).with_context(lost)? {
                match read(other, &bytes).and_then(|theirs| compare(&mine, &theirs).map(|()| theirs)) {
                    Ok(theirs) => *arrival = Some(theirs),
                    Err(difference) => {
                        leave(environment, store);
                        return Err(difference);
                    }
                }
            }
        }
        let missing: Vec<_> = (0..world_size).filter(|&other| arrived[other].is_none()).collect();
        if missing.is_empty() {
            let peers = arrived.into_iter().flatten().map(|arrival| arrival.peer).collect();
            return Ok(Peers::new(rank, peers, listener));
        }
        let missing = first_few(missing.iter().map(|rank| format!("rank {rank}")));
        if let Some(ended) = ended {
            bail!("{ended} while {missing} was awaited: start all ranks anew");
        }
        waiting.set(format!("{missing} at the store {master_addr}:{master_port}"));
        ensure!(
            !waiting.left().is_zero(),
            "{missing} of {world_size} has not arrived within {} ({DEADLINE}). Start it with MASTER_ADDR={master_addr} and \
             MASTER_PORT={master_port}",
            human_seconds(timeout.as_secs_f64())
        );
        std::thread::sleep(PAUSE);
    }
}

fn announced(store: &Store, rank: usize) -> Result<Option<Vec<u8>>> {
    if store.has(&present(rank))? { store.get(&present(rank)).map(Some) } else { Ok(None) }
}

fn read(other: usize, bytes: &[u8]) -> Result<Arrival> {
    serde_json::from_slice(bytes).with_context(|| {
        format!("rank {other} announces itself as another version of cs336 does. Start all ranks with the same version")
    })
}

/// Fails if a setting differs. The lower rank comes first, so that all ranks say the same.
fn compare(mine: &Arrival, theirs: &Arrival) -> Result<()> {
    let (first, second) = if mine.peer.rank < theirs.peer.rank { (mine, theirs) } else { (theirs, mine) };
    let value = |of: &Arrival, name: &str| {
        of.settings.iter().find(|(known, _)| known == name).map_or("none".to_string(), |(_, value)| value.clone())
    };
    for (name, _) in first.settings.iter().chain(&second.settings) {
        let (one, other) = (value(first, name), value(second, name));
        ensure!(
            one == other,
            "the ranks differ in {name}: {} has {one}, {} has {other}. Start all ranks with the same {name}",
            first.peer,
            second.peer
        );
    }
    Ok(())
}

/// Stays, where this rank may serve the store, until the ranks that have arrived know why the run ends too.
fn leave(environment: &Environment, store: &Store) {
    let left = |rank: usize| format!("refused/{rank}");
    // An error means that the store is gone, and then nobody is left to tell.
    let _ = store.set(&left(environment.rank), b"");
    if environment.rank == 0 {
        let stays = |rank: usize| store.has(&present(rank)).unwrap_or(false) && !store.has(&left(rank)).unwrap_or(true);
        wait_until(FAREWELL, || !(1..environment.world_size).any(stays));
    }
}

/// Why a process cannot be `rank`: another one is or was.
fn taken(store: &Store, rank: usize) -> Result<Error> {
    let other = announced(store, rank)?.and_then(|bytes| read(rank, &bytes).ok());
    Ok(match other.is_some_and(|other| other.peer.ended().is_some()) {
        true => anyhow!(
            "rank {rank} has been here and has ended: start all ranks anew, each with its own RANK, and a second command \
             under a torchrun of its own"
        ),
        false => anyhow!("another process is rank {rank} already: give every process its own RANK"),
    })
}

fn present(rank: usize) -> String {
    format!("rank/{rank}")
}

/// One of each rank, in rank order.
type Values = Vec<Vec<u8>>;

/// Every rank's `value` under a name that is used once, in rank order. Rank 0, which may serve the store, returns last.
///
/// # Errors
/// A rank's value has not arrived within the environment's timeout, or will not, since that one of `peers` has ended; a store
/// that does not answer.
pub fn exchange(of: &Environment, store: &Store, peers: &Peers, name: &str, value: &[u8]) -> Result<Values> {
    Exchange::under(name, of, store, peers)?.bounded(value, Exchange::to_all)
}

/// As [`exchange`], to rank 0 alone; the others get nothing and go on at once.
pub fn gather(of: &Environment, store: &Store, peers: &Peers, name: &str, value: &[u8]) -> Result<Values> {
    Exchange::under(name, of, store, peers)?.bounded(value, Exchange::to_rank_0)
}

struct Exchange {
    environment: Environment,
    store: Store,
    peers: Vec<Peer>,
    name: String,
}

impl Exchange {
    fn under(name: &str, environment: &Environment, store: &Store, peers: &Peers) -> Result<Self> {
        let (environment, store, peers) = (environment.clone(), store.under(name)?, peers.all().to_vec());
        Ok(Self { environment, store, peers, name: name.into() })
    }

    /// `values` of this rank's `value`, which end soon after the environment's timeout.
    fn bounded(self, value: &[u8], values: fn(&Self, &[u8], &Waiting) -> Result<Values>) -> Result<Values> {
        let (environment, value) = (self.environment.clone(), value.to_vec());
        let remedy = format!("Look whether the store at {}:{} runs", environment.master_addr, environment.master_port);
        Waiting::during(&environment, INTERVAL, say, |waiting| {
            waiting.bounded(&remedy, || Ok(()), move |waiting| values(&self, &value, waiting))
        })
    }

    fn to_rank_0(&self, value: &[u8], waiting: &Waiting) -> Result<Values> {
        let &Environment { rank, world_size, .. } = &self.environment;
        self.store.set(&key("value", rank), value)?;
        let awaited = if rank == 0 { world_size } else { 0 };
        (0..awaited).map(|rank| self.await_from("value", rank, waiting)).collect()
    }

    fn to_all(&self, value: &[u8], waiting: &Waiting) -> Result<Values> {
        let &Environment { rank, world_size, .. } = &self.environment;
        self.store.set(&key("value", rank), value)?;
        let values = (0..world_size).map(|rank| self.await_from("value", rank, waiting)).collect::<Result<Vec<_>>>()?;
        self.store.set(&key("done", rank), b"")?;
        if rank == 0 {
            (1..world_size).try_for_each(|rank| self.await_from("done", rank, waiting).map(drop))?;
        }
        Ok(values)
    }

    fn await_from(&self, what: &str, other: usize, waiting: &Waiting) -> Result<Vec<u8>> {
        let Self { store, name, .. } = self;
        let (key, peer, mut looked) = (key(what, other), &self.peers[other], Instant::now());
        waiting.set(format!("{peer} to have exchanged its {name}"));
        while !store.has(&key)? {
            // What it left before its end counts.
            let ended = waiting.is_due(&mut looked).then(|| peer.ended()).flatten();
            let said = ended.unwrap_or_default();
            ensure!(ended.is_none() || store.has(&key)?, "{peer} {said} before it exchanged its {name}");
            ensure!(
                !waiting.left().is_zero(),
                "{peer} has not exchanged its {name} within {} ({DEADLINE})",
                human_seconds(self.environment.timeout.as_secs_f64())
            );
            std::thread::sleep(PAUSE);
        }
        store.get(&key)
    }
}

fn key(what: &str, rank: usize) -> String {
    format!("{what}/{rank}")
}

#[cfg(test)]
pub(super) mod tests;
