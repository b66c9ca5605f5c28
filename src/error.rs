//! The errors that somebody branches on; everything else is an `anyhow::Error` with context.

/// A failure that a measured case turns into a typed outcome instead of a message.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The device's (or the host's) allocator refused a request.
    #[error("out of memory{}: {message}", requested(.requested_bytes))]
    OutOfMemory { requested_bytes: Option<u64>, message: String },
    /// The machine lacks something that the case needs; `needs` and `has` are short noun phrases.
    #[error("not available: needs {needs}, has {has}")]
    NotAvailable { needs: String, has: String },
}

/// A failure of this program or its machine while somebody else's code is graded: it costs that code no points.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct NotGraded(pub String);

impl NotGraded {
    /// `error` while we were `doing` something.
    pub fn while_doing(doing: &str, error: impl Into<anyhow::Error>) -> Self {
        Self(format!("{doing}: {:#}", error.into()))
    }

    /// The one inside `error`.
    pub fn of(error: &anyhow::Error) -> Option<&Self> {
        error.chain().find_map(|cause| cause.downcast_ref())
    }
}

fn requested(bytes: &Option<u64>) -> String {
    bytes.map(|b| format!(" asking for {b} bytes")).unwrap_or_default()
}

/// The [`Fault`] inside `error`, if one of its causes is (or reads like) one.
///
/// libtorch is called through our C++ shim, which keeps the type, and through tch, which keeps only the words. They are those of `c10::OutOfMemoryError` ("... out of memory. Tried to allocate 2.00 GiB")
/// and of the CPU allocator ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes").
pub fn fault_of(error: &anyhow::Error) -> Option<Fault> {
    error
        .chain()
        .find_map(|cause| cause.downcast_ref::<Fault>().cloned().or_else(|| fault_in_words(&cause.to_string())))
}

/// `message` without the lines about where C++ stood, which libtorch appends to its errors. A panic quotes what it wraps, so
/// that its line breaks are two characters.
pub fn without_frames(message: &str) -> String {
    let is_kept = |line: &&str| !["frame #", "Exception raised from"].iter().any(|start| line.starts_with(start));
    let lines = message.split('\n').map(|line| line.split("\\n").filter(is_kept).collect::<Vec<_>>());
    let lines: Vec<_> = lines.filter(|pieces| !pieces.is_empty()).map(|pieces| pieces.join("\\n")).collect();
    lines.join("\n").trim_end().to_string()
}

/// Reads an out-of-memory fault out of libtorch's own words.
pub fn fault_in_words(message: &str) -> Option<Fault> {
    let line = message.split('\n').next().unwrap_or_default().split("\\n").next().unwrap_or_default();
    let first_line = || line.split("Exception raised").next().unwrap_or_default().trim_end().to_string();
    if let Some((_, rest)) = message.split_once("you tried to allocate ") {
        let requested_bytes = rest.split_whitespace().next().and_then(|n| n.parse().ok());
        return Some(Fault::OutOfMemory { requested_bytes, message: first_line() });
    }
    if message.contains("out of memory") {
        let requested_bytes = message.split_once("Tried to allocate ").and_then(|(_, rest)| bytes_in_words(rest));
        return Some(Fault::OutOfMemory { requested_bytes, message: first_line() });
    }
    None
}

/// `"2.00 GiB. GPU 0 has ..."` is 2147483648.
fn bytes_in_words(text: &str) -> Option<u64> {
    let mut words = text.split_whitespace();
    let amount: f64 = words.next()?.parse().ok()?;
    let unit = match words.next()?.trim_end_matches(['.', ',']) {
        "bytes" => 1.0,
        "KiB" => crate::units::KIB,
        "MiB" => crate::units::MIB,
        "GiB" => crate::units::GIB,
        _ => return None,
    };
    Some((amount * unit) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_words_become_an_out_of_memory_with_its_size() {
        let fault =
            fault_in_words("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.8 GiB");
        assert!(matches!(fault, Some(Fault::OutOfMemory { requested_bytes: Some(2_684_354_560), .. })), "{fault:?}");
    }

    #[test]
    fn cpu_words_become_an_out_of_memory_with_its_size() {
        let fault = fault_in_words(
            "[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12",
        );
        assert!(matches!(fault, Some(Fault::OutOfMemory { requested_bytes: Some(4096), .. })), "{fault:?}");
    }

    #[test]
    fn the_lines_about_c_plus_plus_are_left_out_of_a_message() {
        let error = "rank 0: too many dims\nException raised from make at x.cpp:1 (most recent call first):\nframe #0: a\nframe #1: b\n\nrank 1: the same";
        assert_eq!(without_frames(error), "rank 0: too many dims\n\nrank 1: the same");
        assert_eq!(without_frames(&error.replace('\n', "\\n")), r"rank 0: too many dims\n\nrank 1: the same");
        assert_eq!(without_frames("a\nb frame #1"), "a\nb frame #1");
    }

    #[test]
    fn of_a_quoted_panic_the_first_line_is_kept() {
        let panic = r#"panicked: called `Result::unwrap()`: Torch("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0\nException raised from malloc at x.cpp:1\nframe #0: a")"#;
        let Some(Fault::OutOfMemory { message, .. }) = fault_in_words(panic) else { panic!("no fault") };
        assert!(message.ends_with("2.00 GiB. GPU 0"), "{message}");
    }

    #[test]
    fn other_words_are_no_fault_and_a_typed_cause_is_found_under_context() {
        assert_eq!(fault_in_words("shapes do not match"), None);
        let fault = Fault::NotAvailable { needs: "a CUDA GPU".into(), has: "none".into() };
        let error = anyhow::Error::new(fault.clone()).context("measuring");
        assert_eq!(fault_of(&error), Some(fault));
    }
}
