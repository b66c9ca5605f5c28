//! A key-value store that the ranks of one run share: c10d's TCPStore.

use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::time::Duration;

use anyhow::{Context as _, Result};
use cxx::UniquePtr;

use super::bridge::{check, ffi};
use crate::process::remedy_for_limit;

/// A connection to a store, and the store's server if this process serves it; both end when it is dropped.
pub struct Store {
    pub(super) inner: UniquePtr<ffi::KeyStore>,
}

impl Store {
    /// Serves a store on a socket that is bound already, so that no port is guessed.
    ///
    /// `timeout` is how long [`Store::get`] waits.
    pub fn serve(listener: TcpListener, timeout: Duration) -> Result<Self> {
        let address = listener.local_addr().context("the store's listener")?;
        // This process reaches a listener on all addresses through the loopback address.
        let host = if address.ip().is_unspecified() { "127.0.0.1".to_string() } else { address.ip().to_string() };
        Self::open(&host, address.port(), listener.into_raw_fd(), timeout)
            .with_context(|| format!("serving a store on {address}"))
    }

    /// Connects to a store that is served now or will be within `timeout`.
    pub fn join(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::open(host, port, -1, timeout).with_context(|| format!("reaching the store at {host}:{port}"))
    }

    fn open(host: &str, port: u16, listener: i32, timeout: Duration) -> Result<Self> {
        let opened = check(ffi::open_store(host, port, listener, milliseconds(timeout)));
        let inner = opened.map_err(|error| match remedy_for_limit(&error) {
            Some(remedy) => error.context(format!("a store needs threads and their memory; {remedy}")),
            None => error,
        })?;
        Ok(Self { inner })
    }

    /// The same store, seen through keys that all begin with `prefix`.
    pub fn under(&self, prefix: &str) -> Result<Self> {
        Ok(Self { inner: check(self.inner.under(prefix))? })
    }

    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check(self.inner.set(key, value)).with_context(|| format!("setting {key} in the store"))
    }

    /// The value of `key`; waits until it is set.
    ///
    /// # Errors
    /// c10d's, when the store's timeout has passed.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let value = check(self.inner.get(key)).with_context(|| format!("waiting for {key} in the store"))?;
        Ok(value.iter().copied().collect())
    }

    /// Whether this is the first claim of `key`; of claims made at once, one is.
    pub fn claim(&self, key: &str) -> Result<bool> {
        Ok(check(self.inner.add(key, 1)).with_context(|| format!("claiming {key} in the store"))? == 1)
    }

    /// Whether `key` is set.
    pub fn has(&self, key: &str) -> Result<bool> {
        check(self.inner.has(key)).with_context(|| format!("looking for {key} in the store"))
    }
}

/// At least one: zero means no limit to libtorch.
pub(super) fn milliseconds(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX).clamp(1, i64::from(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shared_between_connections_and_separated_by_prefix() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        // Long enough for a busy machine to connect; one wait below takes as long.
        let timeout = Duration::from_secs(2);
        let server = Store::serve(listener, timeout).unwrap();
        let client = Store::join("127.0.0.1", port, timeout).unwrap();
        server.set("id", &[7, 0, 255]).unwrap();
        assert_eq!(client.get("id").unwrap(), [7, 0, 255]);
        assert!(client.has("id").unwrap());
        assert!(client.claim("key").unwrap() && !server.claim("key").unwrap());
        let second = client.under("second").unwrap();
        assert!(!second.has("id").unwrap());
        second.set("id", b"").unwrap();
        assert_eq!(server.under("second").unwrap().get("id").unwrap(), b"");
        let error = format!("{:#}", client.get("nothing").unwrap_err());
        assert!(error.starts_with("waiting for nothing in the store: "), "{error}");
    }

    #[test]
    fn joining_a_store_that_is_not_served_fails_after_the_timeout_and_names_it() {
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let error = Store::join("127.0.0.1", port, Duration::from_millis(300)).map(drop).unwrap_err();
        assert!(format!("{error:#}").contains(&format!("127.0.0.1:{port}")), "{error:#}");
    }
}
