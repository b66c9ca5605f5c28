//! Reads a rank's settings from its environment, under the names of torchrun, srun or mpirun.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::printable::one_line;

/// A rank's numbers, and the address of the store where it finds the other ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    pub rank: usize,
    /// The rank's number on its machine, and so the number of its GPU.
    pub local_rank: usize,
    pub world_size: usize,
    /// How many ranks this machine runs; all of them unless the launcher gives another number.
    pub local_world_size: usize,
    pub master_addr: String,
    pub master_port: u16,
    /// Whether the launcher serves the store at that address; rank 0 does otherwise.
    pub agent_store: bool,
    /// How often torchrun has restarted the ranks; each attempt has keys of its own in the launcher's store.
    pub attempt: usize,
    /// The network interface that Gloo is to use (`GLOO_SOCKET_IFNAME`; an empty one is none, as to PyTorch).
    pub interface: Option<String>,
    /// How long a collective may take: what the supervisor allows, else [`DEFAULT_TIMEOUT`].
    pub timeout: Duration,
}

/// c10d's own default for Gloo (`kProcessGroupDefaultTimeout`, torch 2.11: 30 minutes).
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// torchrun's default port, for launchers that set none.
const DEFAULT_PORT: u16 = 29500;

/// A larger number is a mistake, and memory is reserved for each rank.
const MOST_RANKS: usize = 1 << 16;

/// A longer limit overflows the milliseconds that libtorch counts in.
const MOST_SECONDS: f64 = 31_536_000.0;

pub(super) const LOOPBACK: &str = "127.0.0.1";

/// torchrun's variable, `True` if the launcher serves the store; then no free port has to be guessed.
pub(super) const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
pub(super) const DEADLINE: &str = "CS336_DEADLINE_S";

/// A launcher's own names for what torchrun calls RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.
struct Launcher {
    rank: &'static str,
    local_rank: &'static str,
    world_size: &'static str,
    local_world_size: &'static str,
}

/// The first whose rank is set counts. `sbatch` sets SLURM's variables under mpirun too, so Open MPI comes before it.
const LAUNCHERS: [Launcher; 3] = [
    Launcher { rank: "RANK", local_rank: "LOCAL_RANK", world_size: "WORLD_SIZE", local_world_size: "LOCAL_WORLD_SIZE" },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Launcher {
        rank: "SLURM_PROCID",
        local_rank: "SLURM_LOCALID",
        world_size: "SLURM_NTASKS",
        // May be "4(x2)", which is not a number; parsed below.
        local_world_size: "SLURM_STEP_TASKS_PER_NODE",
    },
];

impl Environment {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// Names the variable that is missing or invalid.
    pub fn read() -> Result<Self> {
        // Text that is not UTF-8 must be called wrong, not missing.
        Self::from(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let [torchrun, ..] = &LAUNCHERS;
        let launcher = LAUNCHERS.iter().find(|launcher| variable(launcher.rank).is_some()).unwrap_or(torchrun);
        let text = |name: &str| {
            variable(name)
                .with_context(|| format!("{name} is not set: start ranks with cs336, torchrun, srun or mpirun"))
        };
        let number = |name: &str| parse(name, &text(name)?);
        let (rank, world_size) = (number(launcher.rank)?, number(launcher.world_size)?);
        ensure!(
            world_size <= MOST_RANKS,
            "{} is {world_size}, more than the {MOST_RANKS} ranks that a run may have",
            launcher.world_size
        );
        ensure!(rank < world_size, "{} is {rank}, but {} is {world_size}", launcher.rank, launcher.world_size);
        let local_world_size = match variable(launcher.local_world_size) {
            // SLURM's "4(x2)" is 4 on each of two nodes, its "4,3" is 4 on the first.
            Some(text) => parse(launcher.local_world_size, text.split(['(', ',']).next().unwrap_or_default())?,
            None => world_size,
        };
        let timeout = match variable(DEADLINE) {
            Some(text) => {
                let seconds = text.trim().parse().ok().filter(|seconds| (1e-3..=MOST_SECONDS).contains(seconds));
                let remedy = "write seconds, more than 0 and at most those of a year";
                Duration::from_secs_f64(seconds.with_context(|| format!("{DEADLINE} is {text:?}: {remedy}"))?)
            }
            None => DEFAULT_TIMEOUT,
        };
        let is_torchrun = launcher.rank == torchrun.rank;
        let master_port = match variable("MASTER_PORT") {
            None if !is_torchrun => DEFAULT_PORT,
            _ => {
                let port = number("MASTER_PORT")?;
                u16::try_from(port).ok().filter(|&port| port > 0).with_context(|| {
                    format!("MASTER_PORT is {port}, not a port: choose one from 1024 to 65535 that is free")
                })?
            }
        };
        let master_addr = one_host(match variable("MASTER_ADDR") {
            Some(address) => address,
            None if !is_torchrun => match variable("SLURM_STEP_NODELIST") {
                Some(nodes) => first_node(&nodes),
                None if local_world_size == world_size => LOOPBACK.to_string(),
                None => text("MASTER_ADDR")?,
            },
            None => text("MASTER_ADDR")?,
        })?;
        Ok(Self {
            rank,
            local_rank: number(launcher.local_rank)?,
            world_size,
            local_world_size,
            master_addr,
            master_port,
            agent_store: variable(AGENT_STORE).is_some_and(|value| value == "True"),
            attempt: variable("TORCHELASTIC_RESTART_COUNT").and_then(|count| count.parse().ok()).unwrap_or(0),
            interface: variable("GLOO_SOCKET_IFNAME").filter(|name| !name.is_empty()),
            timeout,
        })
    }
}

fn parse(name: &str, text: &str) -> Result<usize> {
    text.parse().map_err(|_| anyhow!("{name} is {text:?}, not a whole number from 0"))
}

/// Errors: an address that is not one printable line; ranks print it while they wait.
fn one_host(address: String) -> Result<String> {
    let remedy = "write a host's name or address";
    ensure!(address == one_line(&address), "MASTER_ADDR or SLURM_STEP_NODELIST names the host {address:?}: {remedy}");
    Ok(address)
}

/// The first host of SLURM's list: `"a[07-09,12],b1"` begins with `a07`.
fn first_node(nodes: &str) -> String {
    let (name, rest) = nodes.split_at(nodes.find(['[', ',']).unwrap_or(nodes.len()));
    match rest.strip_prefix('[') {
        Some(numbers) => format!("{name}{}", numbers.split(['-', ',', ']']).next().unwrap_or_default()),
        None => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Environment> {
        Environment::from(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
    }

    const TORCHRUN: &[(&str, &str)] = &[
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29511"),
    ];

    fn changed(name: &str, value: Option<&'static str>) -> Result<Environment> {
        let others = TORCHRUN.iter().copied().filter(|(known, _)| *known != name);
        let name = TORCHRUN.iter().map(|(known, _)| *known).chain([DEADLINE]).find(|known| *known == name).unwrap();
        from(&others.chain(value.map(|value| (name, value))).collect::<Vec<_>>())
    }

    #[test]
    fn torchruns_environment_is_read_and_errors_name_the_variable() {
        let read = from(TORCHRUN).unwrap();
        assert_eq!((read.rank, read.world_size, read.local_world_size), (1, 2, 2));
        assert_eq!((read.master_port, read.timeout), (29511, DEFAULT_TIMEOUT));
        let interface = |name| from(&[TORCHRUN, &[("GLOO_SOCKET_IFNAME", name)]].concat()).unwrap().interface;
        assert_eq!(["eth0", ""].map(interface), [Some("eth0".to_string()), None]);
        for (name, value) in [
            ("RANK", None),
            ("RANK", Some("2")),
            ("WORLD_SIZE", Some("two")),
            ("MASTER_PORT", Some("70000")),
            ("MASTER_PORT", Some("0")),
            ("MASTER_PORT", None),
            ("MASTER_ADDR", None),
            (DEADLINE, Some("-1")),
            (DEADLINE, Some("0")),
            (DEADLINE, Some("nan")),
            (DEADLINE, Some("1e19")),
            ("WORLD_SIZE", Some("18446744073709551615")),
        ] {
            let error = changed(name, value).unwrap_err();
            assert!(format!("{error:#}").contains(name), "{name} {value:?}: {error:#}");
        }
    }

    #[test]
    fn slurms_and_open_mpis_environments_are_read_where_rank_is_missing() {
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_STEP_NODELIST", "gpu[07-08]"),
        ];
        let read = from(&slurm).unwrap();
        assert_eq!((read.rank, read.local_rank, read.world_size, read.local_world_size), (5, 1, 8, 4));
        assert_eq!((read.master_addr.as_str(), read.master_port), ("gpu07", DEFAULT_PORT));
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let inside_sbatch: Vec<_> =
            slurm.iter().filter(|(name, _)| *name != "SLURM_STEP_NODELIST").chain(&mpi).copied().collect();
        let error = from(&inside_sbatch).unwrap_err();
        assert!(error.to_string().contains("MASTER_ADDR"), "several machines need it: {error:#}");
        let with_master = [&inside_sbatch[..], &[("MASTER_ADDR", "head")]].concat();
        let read = from(&with_master).unwrap();
        assert_eq!((read.rank, read.world_size, read.master_addr.as_str()), (2, 4, "head"));
        let torchrun_inside_sbatch = [&slurm[..], TORCHRUN].concat();
        assert_eq!(from(&torchrun_inside_sbatch).unwrap().rank, 1);
        for (nodes, first) in [("a1", "a1"), ("a1,b2", "a1"), ("a[07,9],b1", "a07"), ("a[1]", "a1")] {
            assert_eq!(first_node(nodes), first);
        }
    }
}
