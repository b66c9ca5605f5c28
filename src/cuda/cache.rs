//! What is made once for each device, such as loaded kernels, and kept until the process ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use tch::Device;

/// A value for each device and each key.
pub struct Cache<K, V>(Mutex<ByDevice<K, V>>);

/// By the GPU's number, `None` for the CPU.
type ByDevice<K, V> = BTreeMap<(Option<usize>, K), Arc<Mutex<Option<Arc<V>>>>>;

impl<K: Ord, V> Cache<K, V> {
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// The value of `key` on `device`, made by `make` at the first call; an error is not kept.
    pub fn get(&self, device: Device, key: K, make: impl FnOnce() -> Result<V>) -> Result<Arc<V>> {
        let index = if let Device::Cuda(index) = device { Some(index) } else { None };
        let of_key = lock(&self.0).entry((index, key)).or_default().clone();
        // Held while the value is made: another thread waits for the same program, and compiles other programs meanwhile.
        let mut made = lock(&of_key);
        if let Some(value) = &*made {
            return Ok(value.clone());
        }
        Ok(made.insert(Arc::new(make()?)).clone())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Ord, V> Default for Cache<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once_a_device_and_an_error_is_not_kept() {
        let cache: Cache<u32, u32> = Cache::new();
        assert!(cache.get(Device::Cpu, 1, || anyhow::bail!("not now")).is_err());
        let first = cache.get(Device::Cpu, 1, || Ok(10)).unwrap();
        let again = cache.get(Device::Cpu, 1, || unreachable!("it is there")).unwrap();
        let (elsewhere, other) = (cache.get(Device::Cuda(0), 1, || Ok(20)), cache.get(Device::Cpu, 2, || Ok(30)));
        assert_eq!((*first, *again, *elsewhere.unwrap(), *other.unwrap()), (10, 10, 20, 30));
    }
}
