//! A rank's way to the others: it serves or reaches their store, and finds its own address.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};

use super::environment::{DEADLINE, Environment};
use super::waiting::Waiting;
use crate::printable::one_line;
use crate::torch::gloo::{Address, Member};
use crate::torch::store::Store;
use crate::units::human_seconds;

/// How long one attempt to connect may take. The kernel takes 3 s to find that no host has an address.
const ATTEMPT: Duration = Duration::from_secs(5);

/// The interface of ranks on one machine.
pub const LOOPBACK_INTERFACE: &str = "lo";

/// The pause between two attempts.
pub const PAUSE: Duration = Duration::from_millis(10);

impl Environment {
    /// Connects to this run's store. Rank 0 serves it unless the launcher does.
    ///
    /// # Errors
    /// MASTER_ADDR is not an address of rank 0's host, MASTER_PORT is taken, or the store cannot be reached in time.
    pub fn store(&self, waiting: &Waiting) -> Result<Store> {
        let &Self { rank, world_size, ref master_addr, master_port, agent_store, attempt, timeout, .. } = self;
        // Name servers may be slow.
        waiting.set(format!("rank 0's store at {master_addr}:{master_port}"));
        let store = if rank == 0 && !agent_store {
            Store::serve(self.serve()?, timeout)
        } else {
            self.reach_store(waiting)?;
            waiting.set(format!("an answer of rank 0's store at {master_addr}:{master_port}"));
            Store::join(master_addr, master_port, timeout).with_context(|| {
                let host = host_name();
                format!(
                    "rank {rank} of {world_size} on {host} finds no store there; correct MASTER_ADDR and MASTER_PORT"
                )
            })
        };
        store?.under(&format!("cs336/attempt_{attempt}"))
    }

    /// Errors: this host lacks the interface of `GLOO_SOCKET_IFNAME`; those that it has. Every host has the loopback interface,
    /// also where a container does not list it.
    pub fn require_interface(&self) -> Result<()> {
        // Unlike /sys/class/net, of the network namespace that this process is in.
        const INTERFACES: &str = "/proc/self/net/dev";
        let Some(name) = self.interface.as_ref().filter(|name| *name != LOOPBACK_INTERFACE) else { return Ok(()) };
        ensure!(!name.contains(','), "GLOO_SOCKET_IFNAME is {name:?}: name one interface, and no list");
        // An address of an interface may have a label after its name (ip-address(8)).
        let device = name.split(':').next().unwrap_or(name);
        let listed = std::fs::read(INTERFACES).with_context(|| format!("failed to read {INTERFACES}"))?;
        // The name of another interface may be any bytes.
        let listed = String::from_utf8_lossy(&listed);
        let mut known: Vec<_> = listed.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
        known.sort_unstable();
        if !known.contains(&device) {
            let known = known.join(", ");
            bail!("GLOO_SOCKET_IFNAME is {name:?}, and {} has no such interface: name one of {known}", host_name());
        }
        Ok(())
    }

    /// How this rank joins a Gloo group, if its peers reach it at `address`.
    pub fn member(&self, address: IpAddr) -> Member {
        let address = match &self.interface {
            Some(interface) => Address::Interface(interface.clone()),
            None => Address::Host(address.to_string()),
        };
        Member { rank: self.rank, world_size: self.world_size, address, timeout: self.timeout }
    }

    /// The address of rank 0's host, as this machine resolves it.
    pub fn master_ip(&self) -> Result<IpAddr> {
        let addresses = self.store_addresses()?;
        Ok(addresses.first().with_context(|| format!("MASTER_ADDR {:?} has no address", self.master_addr))?.ip())
    }

    /// This machine's address on the route to rank 0; connecting a datagram socket sends nothing.
    pub fn own_ip(&self) -> Result<IpAddr> {
        let master = self.master_ip()?;
        let any: IpAddr = if master.is_ipv4() { IpAddr::from([0, 0, 0, 0]) } else { IpAddr::from([0u16; 8]) };
        let socket = UdpSocket::bind((any, 0)).context("looking for this machine's address")?;
        socket.connect((master, self.master_port)).with_context(|| format!("looking for the route to {master}"))?;
        Ok(socket.local_addr()?.ip())
    }

    /// The address to listen on, so that every rank reaches `own`.
    ///
    /// Debian's /etc/hosts gives a machine's own name the address 127.0.1.1, which other machines cannot reach.
    pub fn listening_ip(&self, own: IpAddr) -> IpAddr {
        let hidden = own.is_loopback() && self.local_world_size < self.world_size;
        if hidden { IpAddr::from([0, 0, 0, 0]) } else { own }
    }

    fn serve(&self) -> Result<TcpListener> {
        let (host, port) = (&self.master_addr, self.master_port);
        TcpListener::bind((self.listening_ip(self.master_ip()?), port)).map_err(|error| {
            let remedy = match error.kind() {
                ErrorKind::AddrInUse => "If another process has RANK=0 too, give every process its own RANK. Else set \
                                         MASTER_PORT to a port that is free"
                    .to_string(),
                ErrorKind::AddrNotAvailable => {
                    format!(
                        "Set MASTER_ADDR to an address of rank 0's host; {} does not have this one. If rank 0 runs elsewhere, \
                         give this process its own RANK",
                        host_name()
                    )
                }
                _ => "Set MASTER_ADDR to rank 0's host and MASTER_PORT to a port that is free".to_string(),
            };
            anyhow!("rank 0 cannot serve the store at {host}:{port}: {error}. {remedy}")
        })
    }

    fn store_addresses(&self) -> Result<Vec<SocketAddr>> {
        let (host, port) = (self.master_addr.as_str(), self.master_port);
        let found = (host, port).to_socket_addrs();
        Ok(found.with_context(|| format!("MASTER_ADDR {host:?} cannot be resolved; correct it"))?.collect())
    }

    /// Waits until something listens at the store's address. libtorch would wait too, but print a stack at each attempt.
    fn reach_store(&self, waiting: &Waiting) -> Result<()> {
        let &Self { rank, world_size, ref master_addr, master_port, timeout, .. } = self;
        loop {
            let attempt = self.store_addresses().and_then(|addresses| Ok(reach(&addresses)?));
            let Err(error) = attempt else { return Ok(()) };
            waiting.set(format!("rank 0's store at {master_addr}:{master_port} ({error:#})"));
            if waiting.left().is_zero() {
                bail!(
                    "rank {rank} of {world_size} on {} cannot reach rank 0's store at {master_addr}:{master_port}: \
                     {error:#}. It tried for {} ({DEADLINE}). Start rank 0 there, or correct MASTER_ADDR and MASTER_PORT",
                    host_name(),
                    human_seconds(timeout.as_secs_f64())
                );
            }
            std::thread::sleep(PAUSE.min(waiting.left()));
        }
    }
}

/// Whether something listens at one of `addresses`; else the last one's error.
pub fn reach(addresses: &[SocketAddr]) -> std::io::Result<()> {
    let attempt = |address| TcpStream::connect_timeout(address, ATTEMPT).map(drop);
    let mut outcome = Err(ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        outcome = attempt(address);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// This machine's name, for messages.
pub fn host_name() -> String {
    one_line(&rustix::system::uname().nodename().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::environment::LOOPBACK;
    use crate::collective::rendezvous::tests::{PATIENCE, environment, wait};

    fn free_port() -> u16 {
        TcpListener::bind((LOOPBACK, 0)).unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn a_host_name_of_this_machine_can_serve_the_store_like_an_address() {
        let base = Environment { master_port: free_port(), ..environment(1, 2, PATIENCE) };
        let head = Environment { rank: 0, master_addr: "localhost".into(), ..base.clone() };
        assert!(head.own_ip().unwrap().is_loopback());
        let store = wait(&head, |waiting| head.store(waiting)).unwrap();
        assert!(
            TcpListener::bind(("127.0.0.2", base.master_port)).is_ok(),
            "a store for one machine listens on its own address only"
        );
        wait(&base, |waiting| base.store(waiting)).unwrap().set("key", b"value").unwrap();
        assert_eq!(store.get("key").unwrap(), b"value");
    }

    #[test]
    fn a_taken_port_and_an_address_of_another_host_are_different_faults_of_rank_0() {
        let taken = TcpListener::bind((LOOPBACK, 0)).unwrap();
        let base = Environment { master_port: taken.local_addr().unwrap().port(), ..environment(0, 2, PATIENCE) };
        let refused = |rank: &Environment| wait(rank, |waiting| rank.store(waiting)).map(drop).unwrap_err().to_string();
        let port_taken = refused(&base);
        assert!(port_taken.contains("127.0.0.1") && port_taken.contains("set MASTER_PORT to a port"), "{port_taken}");
        assert!(port_taken.contains("give every process its own RANK"), "{port_taken}");
        // RFC 5737: no host has this address.
        let elsewhere = refused(&Environment { master_addr: "192.0.2.1".into(), ..base });
        assert!(
            elsewhere.contains("192.0.2.1") && elsewhere.contains("Set MASTER_ADDR to an address of rank 0's host"),
            "{elsewhere}"
        );
        assert!(!elsewhere.contains("port that is free") && elsewhere.contains(&host_name()), "{elsewhere}");
    }

    #[test]
    fn an_interface_that_the_host_lacks_is_named_with_those_that_it_has() {
        let on = |interface: &str| Environment { interface: Some(interface.into()), ..environment(0, 1, PATIENCE) };
        on("lo").require_interface().unwrap();
        let error = on("nope0").require_interface().unwrap_err().to_string();
        assert!(error.contains("GLOO_SOCKET_IFNAME is \"nope0\"") && error.contains("name one of"), "{error}");
        on("lo:1").require_interface().unwrap();
        let error = on("lo,eth0").require_interface().unwrap_err().to_string();
        assert!(error.contains("name one interface, and no list"), "{error}");
    }

    #[test]
    fn a_store_that_is_not_served_is_named_with_its_address_and_the_variables_to_correct() {
        let timeout = Duration::from_millis(300);
        let rank = Environment { master_port: free_port(), ..environment(1, 2, timeout) };
        let error = wait(&rank, |waiting| rank.store(waiting)).map(drop).unwrap_err().to_string();
        let store =
            format!("rank 1 of 2 on {} cannot reach rank 0's store at 127.0.0.1:{}", host_name(), rank.master_port);
        assert!(error.starts_with(&store) && error.contains("Connection refused"), "{error}");
        assert!(
            error.contains("300.0 ms (CS336_DEADLINE_S)") && error.ends_with("MASTER_ADDR and MASTER_PORT"),
            "{error}"
        );
        let lost = Environment { master_addr: "not a host name".into(), ..rank };
        let error = wait(&lost, |waiting| lost.store(waiting)).map(drop).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR \"not a host name\" cannot be resolved"), "{error}");
    }

    #[test]
    fn a_program_that_listens_at_the_stores_address_and_says_nothing_ends_the_wait() {
        let silent = TcpListener::bind((LOOPBACK, 0)).unwrap();
        let port = silent.local_addr().unwrap().port();
        let rank = Environment { master_port: port, ..environment(1, 2, Duration::from_millis(300)) };
        let outcome =
            wait(&rank.clone(), |waiting| waiting.bounded("Look.", || Ok(()), move |waiting| rank.store(waiting)));
        let error = outcome.map(drop).unwrap_err().to_string();
        let expected = format!("waited for an answer of rank 0's store at 127.0.0.1:{port} in vain");
        assert!(error.contains(&expected) && error.contains("CS336_DEADLINE_S"), "{error}");
    }
}
