//! The ranks of one run: the host and the address of each, and which of them are lost after a failure.

use std::fmt::{self, Display};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::environment::Environment;
use super::network::{host_name, reach};
use crate::printable::{first_few, one_line};
use crate::process::has_parent;

/// A dying rank's connections close one after the other, so its listener may outlive the one whose end was seen.
const GRACE: Duration = Duration::from_millis(500);

/// How many connections the kernel completes that a rank never accepts: each time that another one looks whether it lives.
const MOST_CONNECTIONS: i32 = 4096;

/// One rank, as the others see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    pub rank: usize,
    /// The name of its host, for messages.
    pub host: String,
    /// The rank listens here until it ends.
    pub address: SocketAddr,
    /// Rank 0's host, as this rank's host resolves MASTER_ADDR.
    master: IpAddr,
    /// Set once this process has connected to it.
    #[serde(skip)]
    reached: Arc<OnceLock<()>>,
}

/// All ranks of a run, in rank order.
pub struct Peers {
    own: usize,
    peers: Vec<Peer>,
    /// Never accepts: the kernel completes connections as long as this process lives, also while it is busy.
    _listener: TcpListener,
}

impl Peer {
    /// This rank, and what it listens with.
    pub fn here(environment: &Environment) -> Result<(Self, TcpListener)> {
        let own = environment.own_ip()?;
        let listening = || format!("listening on this host's address {own}");
        let listener = TcpListener::bind((environment.listening_ip(own), 0)).with_context(listening)?;
        rustix::net::listen(&listener, MOST_CONNECTIONS).with_context(listening)?;
        let address = SocketAddr::new(own, listener.local_addr()?.port());
        let (rank, host, master) = (environment.rank, host_name(), environment.master_ip()?);
        Ok((Self { rank, host, address, master, reached: Arc::default() }, listener))
    }

    /// That nothing listens at its address, as the words after its name. A host that cannot be reached shows nothing.
    pub fn ended(&self) -> Option<&'static str> {
        let error = self.reach().err()?;
        (error.kind() == ErrorKind::ConnectionRefused).then(|| self.refused())
    }

    fn reach(&self) -> std::io::Result<()> {
        reach(&[self.address])?;
        self.reached.get_or_init(|| ());
        Ok(())
    }

    /// What a refused connection means: a firewall that rejects all of them looks like the end of the rank behind it.
    fn refused(&self) -> &'static str {
        let is_reachable = self.reached.get().is_some() || self.host == host_name();
        if is_reachable { "has ended" } else { "has ended, or a firewall rejects connections to it" }
    }
}

impl Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "rank {} on {} ({})", self.rank, one_line(&self.host), self.address.ip())
    }
}

impl Peers {
    /// `peers` in rank order, of which `own` is this process.
    pub fn new(own: usize, mut peers: Vec<Peer>, listener: TcpListener) -> Self {
        // Where rank 0's host resolves its own name to a loopback address, the other hosts know the address to use.
        let master = peers.iter().map(|peer| peer.master).find(|ip| !ip.is_loopback());
        for peer in peers.iter_mut().filter(|peer| peer.address.ip().is_loopback()) {
            peer.address.set_ip(master.unwrap_or(peer.address.ip()));
        }
        Self { own, peers, _listener: listener }
    }

    /// This rank.
    pub fn own(&self) -> &Peer {
        &self.peers[self.own]
    }

    /// All ranks, in rank order.
    pub fn all(&self) -> &[Peer] {
        &self.peers
    }

    pub fn others(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().filter(|peer| peer.rank != self.own)
    }

    /// The other ranks, or the first few of them, for a message.
    pub fn names_of_others(&self) -> String {
        first_few(self.others().map(Peer::to_string).collect::<Vec<_>>().into_iter())
    }

    /// Connects to every other rank's listener, all at the same time; the other ranks in rank order.
    pub fn reach_all(&self) -> Vec<(&Peer, std::io::Result<()>)> {
        thread::scope(|scope| {
            let start = |peer: &Peer| {
                let peer = peer.clone();
                thread::Builder::new().spawn_scoped(scope, move || peer.reach())
            };
            let started: Vec<_> = self.others().map(|peer| (peer, start(peer))).collect();
            let lost = |_| Err(std::io::Error::other("the thread that connects panicked"));
            let ended = started
                .into_iter()
                .map(|(peer, attempt)| (peer, attempt.and_then(|attempt| attempt.join().unwrap_or_else(lost))));
            ended.collect()
        })
    }

    /// Notes that the network lets this rank connect to the others.
    pub fn connected(&self) {
        for peer in self.others() {
            peer.reached.get_or_init(|| ());
        }
    }

    /// Adds to this rank's error what became of the others, unless a supervisor sees them.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        if has_parent() || self.peers.len() == 1 { error } else { error.context(self.after_failure()) }
    }

    /// What became of the other ranks, as the beginning of this rank's error: those that are lost, else all.
    fn after_failure(&self) -> String {
        let mut found = self.reach_all();
        let is_lost = |(_, reached): &(&Peer, std::io::Result<()>)| reached.is_err();
        if !found.iter().any(is_lost) {
            // Not more often: connections that a rank has not accepted fill its queue.
            thread::sleep(GRACE);
            found = self.reach_all();
        }
        let any_lost = found.iter().any(is_lost);
        let state = |(peer, reached): &(&Peer, std::io::Result<()>)| match reached {
            Ok(()) if any_lost => None,
            Ok(()) => Some(format!("{peer} has not ended")),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Some(format!("{peer} {}", peer.refused())),
            Err(error) => Some(format!("{peer} cannot be reached ({error})")),
        };
        let states: Vec<String> = found.iter().filter_map(state).collect();
        format!("{} of {} ranks failed; {}", self.own(), self.peers.len(), first_few(states.into_iter()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::rendezvous::tests::environment;

    fn peers(count: usize) -> (Vec<Peer>, Vec<TcpListener>) {
        let here = |rank| Peer::here(&environment(rank, count, Duration::from_secs(1))).unwrap();
        (0..count).map(here).unzip()
    }

    #[test]
    fn a_rank_that_has_ended_is_told_from_one_that_is_late() {
        let (known, mut listeners) = peers(3);
        let peers = Peers::new(0, known, listeners.remove(0));
        let host = host_name();
        let rank = |rank: usize| format!("rank {rank} on {host} (127.0.0.1)");
        let [zero, one, two] = [0, 1, 2].map(rank);
        assert_eq!(
            peers.after_failure(),
            format!("{zero} of 3 ranks failed; {one} has not ended, {two} has not ended")
        );
        drop(listeners.pop());
        assert_eq!(peers.after_failure(), format!("{zero} of 3 ranks failed; {two} has ended"));
    }

    #[test]
    fn a_far_rank_that_was_never_reached_may_be_behind_a_firewall() {
        let (mut known, mut listeners) = peers(3);
        let far = |mut peer: Peer| {
            peer.host = "far\n".into();
            peer
        };
        let last = known.pop().map(far).unwrap();
        assert!(last.to_string().starts_with("rank 2 on far\\n ("), "{last}");
        assert_eq!(last.ended(), None);
        let lost = known.pop().map(far).unwrap();
        listeners.truncate(1);
        assert_eq!(last.ended(), Some("has ended"));
        assert_eq!(lost.ended(), Some("has ended, or a firewall rejects connections to it"));
        let known = vec![known.remove(0), lost, last];
        let peers = Peers::new(0, known, listeners.remove(0));
        peers.connected();
        assert_eq!(peers.all()[1].ended(), Some("has ended"));
    }

    #[test]
    fn a_loopback_address_of_rank_0_is_replaced_by_the_one_that_other_hosts_know() {
        let (mut known, mut listeners) = peers(2);
        let far = IpAddr::from([192, 0, 2, 2]);
        known[1].address.set_ip(far);
        known[1].master = IpAddr::from([192, 0, 2, 1]);
        let peers = Peers::new(0, known, listeners.remove(0));
        assert_eq!((peers.own().address.ip(), peers.peers[1].address.ip()), (IpAddr::from([192, 0, 2, 1]), far));
    }
}
