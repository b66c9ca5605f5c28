//! Golden cases: safetensors files of inputs and expected outputs, run on the registered implementations.

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde::de::IgnoredAny;
use tch::{Kind as DType, Tensor};

use crate::harness::problem::Verdict;
use crate::harness::subject::Subject;
use crate::json::{self, refusal};
use crate::printable::one_line;
use crate::root;
use crate::torch::safetensors::tensor;

pub mod adamw;
pub mod attention;
pub mod rmsnorm;
pub mod rope;
mod tolerances;
pub mod training;
pub mod transformer;

/// Runs a case on a subject's implementations.
pub type RunSubject = fn(&CaseFile, &Subject) -> Result<Vec<Comparison>>;

/// One kind of case: its name in the metadata key `kind`, and its function.
pub struct CaseKind {
    pub name: &'static str,
    /// The names of the tensors that a file expects. One that ends with a dot begins the names of several.
    pub expected: &'static [&'static str],
    /// Where the kind trains, the names of tensors before and after it, or how they begin.
    pub trained: Option<[&'static str; 2]>,
    /// A failed comparison is part of the result. An `Err` means that the file cannot be run.
    pub run: fn(&CaseFile) -> Result<Vec<Comparison>>,
    /// The same for a subject; `None` where the assignment has no adapter for it.
    pub run_subject: Option<RunSubject>,
}

impl CaseKind {
    /// A kind for which the assignment has no adapter, and which trains nothing.
    const fn of_ours(
        name: &'static str,
        expected: &'static [&'static str],
        run: fn(&CaseFile) -> Result<Vec<Comparison>>,
    ) -> Self {
        Self { name, expected, trained: None, run, run_subject: None }
    }
}

/// A larger file only fills the memory; a whole model of 10^9 parameters in float32 fits.
const MAX_BYTES: u64 = 4 << 30;

/// The most positions in a case. A longer RoPE table would only use more memory.
const MAX_POSITIONS: i64 = 1 << 20;

/// Every kind of case.
pub const KINDS: &[CaseKind] = &[
    CaseKind {
        name: "attention",
        expected: &["o", "lse", "dq", "dk", "dv"],
        trained: None,
        run: attention::run,
        run_subject: Some(attention::run_subject),
    },
    CaseKind::of_ours("transformer", &["logits", "loss", "grad."], transformer::run),
    CaseKind::of_ours("rmsnorm", &["y"], rmsnorm::run),
    CaseKind::of_ours("rope", &["y"], rope::run),
    CaseKind { trained: Some(["param", "param_after"]), ..CaseKind::of_ours("adamw", &["param_after"], adamw::run) },
    CaseKind {
        name: "data_parallel",
        expected: &["final."],
        trained: Some(["init.", "final."]),
        run: training::run,
        run_subject: Some(training::compare_subject),
    },
    CaseKind {
        name: "sharded_optimizer",
        expected: &["final."],
        trained: Some(["init.", "final."]),
        run: training::run,
        run_subject: Some(training::compare_subject),
    },
];

/// Runs `case` by its kind. Fails for an unknown kind, an incomplete file, and tolerances that let everything pass.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    run_on(case, None)
}

/// As [`run`]; where a subject is given, on its implementations instead of ours.
pub fn run_on(case: &CaseFile, subject: Option<&Subject>) -> Result<Vec<Comparison>> {
    let name = case.meta("kind")?;
    let kind = KINDS.iter().find(|kind| kind.name == name).with_context(|| {
        let known: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
        format!("no kind of case is called {name:?} (known: {})", known.join(", "))
    })?;
    case.require_expectations_that_can_fail(kind.expected)?;
    kind.trained.map_or(Ok(()), |names| case.require_change(names))?;
    let comparisons = match (subject, kind.run_subject) {
        (None, _) => (kind.run)(case)?,
        (Some(subject), Some(run)) => run(case, subject)?,
        (Some(_), None) => bail!("the assignment has no adapter for cases of kind {name:?}; remove it from the cases"),
    };
    ensure!(!comparisons.is_empty(), "the case compared nothing: add at least one expected tensor");
    Ok(comparisons)
}

/// A case as read: its string metadata and its tensors, on the CPU.
pub struct CaseFile {
    pub path: PathBuf,
    pub metadata: BTreeMap<String, String>,
    pub tensors: BTreeMap<String, Tensor>,
}

impl CaseFile {
    pub fn read(path: &Path) -> Result<Self> {
        let file = std::fs::metadata(path).with_context(|| match path.read_link() {
            Ok(target) => {
                format!("the file is a link to {target:?}, which cannot be opened; correct or remove the link")
            }
            Err(_) => format!("{path:?} cannot be opened"),
        })?;
        ensure!(file.is_file(), "this is {}, not a regular file; remove it from the cases", name_of(file.file_type()));
        let bytes = root::read_at_most(path, MAX_BYTES).context("the file cannot be read")?;
        Self::parse(&bytes, path).context("the file is not a valid case")
    }

    /// Parses the bytes of a safetensors file. `path` is only used as the case's name.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let (length, header) =
            SafeTensors::read_metadata(bytes).map_err(refusal).context("not in the safetensors format (truncated?)")?;
        json::from_str::<IgnoredAny>(&String::from_utf8_lossy(&bytes[8..][..length])).context("its header")?;
        let metadata = header.metadata().clone().context("it has no metadata: kind, rtol and atol are needed")?;
        let tensors = SafeTensors::deserialize(bytes)?
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                ensure!(name == one_line(&name), "the name {name:?} cannot be printed; rename the tensor");
                let tensor = tensor_of(&view).with_context(|| format!("tensor {name:?}"))?;
                Ok((name, tensor))
            })
            .collect::<Result<_>>()?;
        Ok(Self { path: path.into(), metadata: metadata.into_iter().collect(), tensors })
    }

    /// The metadata under `key`.
    pub fn meta(&self, key: &str) -> Result<&str> {
        self.metadata.get(key).map(String::as_str).with_context(|| format!("the metadata lacks {key:?}"))
    }

    /// The metadata under `key` as a number, a bool, or whatever `T` reads.
    pub fn meta_as<T: std::str::FromStr>(&self, key: &str) -> Result<T> {
        let text = self.meta(key)?;
        let expected = match std::any::type_name::<T>() {
            "bool" => "true or false",
            "f32" | "f64" => "a number",
            _ => "a whole number",
        };
        text.trim().parse().ok().with_context(|| format!("the metadata's {key:?} is {text:?}: write {expected}"))
    }

    /// The metadata under `key` as a finite number that is not negative.
    pub fn meta_positive(&self, key: &str) -> Result<f64> {
        let value: f64 = self.meta_as(key)?;
        ensure!(
            value.is_finite() && value >= 0.0,
            "the metadata's {key:?} is {value:?}: it must be zero or positive, and finite"
        );
        Ok(value)
    }

    /// Refuses tensors with other names: an expected tensor that is never compared would always pass.
    pub fn only(&self, names: &[&str]) -> Result<()> {
        let other: Vec<_> = self.tensors.keys().filter(|name| !names.contains(&name.as_str())).collect();
        ensure!(
            other.is_empty(),
            "tensors {other:?} do not belong to this kind ({}): correct or remove them",
            names.join(", ")
        );
        Ok(())
    }

    /// `(rtol, atol)`, both finite and not negative.
    pub fn tolerances(&self) -> Result<(f64, f64)> {
        Ok((self.meta_positive("rtol")?, self.meta_positive("atol")?))
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).with_context(|| format!("tensor {name:?} is missing"))
    }
}

/// What is no regular file, in words.
fn name_of(kind: std::fs::FileType) -> &'static str {
    match kind {
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

fn tensor_of(view: &TensorView<'_>) -> Result<Tensor> {
    let shape = view.shape();
    ensure!(!shape.contains(&0), "it has shape {shape:?} and therefore no elements; a case needs some in every tensor");
    tensor(view)
}

/// The comparison of one output of one implementation with the expected tensor.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Comparison {
    pub implementation: String,
    pub tensor: String,
    /// The largest |actual - expected|, and the largest |actual - expected| / |expected| over nonzero expected values; NaN if
    /// the two cannot be compared.
    pub max_abs_error: f64,
    pub max_rel_error: f64,
    pub rtol: f64,
    pub atol: f64,
    pub passed: bool,
    /// Another reason for a failure, or empty.
    pub note: String,
}

impl Comparison {
    /// From what [`errors`] gives, or the reason why there is nothing to compare.
    fn of(implementation: &str, tensor: &str, outcome: Result<(f64, f64, String)>, (rtol, atol): (f64, f64)) -> Self {
        let (max_abs_error, max_rel_error, note) = outcome.unwrap_or_else(|e| (f64::NAN, f64::NAN, format!("{e:#}")));
        let (implementation, tensor, passed) = (implementation.into(), tensor.into(), note.is_empty());
        Self { implementation, tensor, max_abs_error, max_rel_error, rtol, atol, passed, note }
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { implementation, tensor, max_abs_error, max_rel_error, rtol, atol, passed, note } = self;
        write!(f, "{} {implementation}: {tensor}: ", if *passed { "passed" } else { "FAILED" })?;
        if max_abs_error.is_nan() {
            return f.write_str(note);
        }
        write!(
            f,
            "largest absolute error {max_abs_error:.3e} (atol {atol:.1e}), relative {max_rel_error:.3e} (rtol {rtol:.1e})"
        )?;
        if note.is_empty() { Ok(()) } else { write!(f, "; {note}") }
    }
}

/// Checks |actual - expected| <= atol + rtol |expected| everywhere, in float64. Different shapes or a NaN fail; equal
/// infinities are equal.
pub fn compare(
    implementation: &str,
    tensor: &str,
    actual: &Tensor,
    expected: &Tensor,
    rtol: f64,
    atol: f64,
) -> Comparison {
    Comparison::of(implementation, tensor, errors(actual, expected, rtol, atol), (rtol, atol))
}

/// The largest absolute and relative errors, and a note that is empty where every element is within tolerance.
fn errors(actual: &Tensor, expected: &Tensor, rtol: f64, atol: f64) -> Result<(f64, f64, String)> {
    let _no_grad = tch::no_grad_guard();
    ensure!(actual.size() == expected.size(), "shape {:?}, expected {:?}", actual.size(), expected.size());
    ensure!(actual.numel() > 0, "no elements");
    let values =
        |t: &Tensor| -> Result<Tensor> { Ok(t.f_detach()?.f_to_device(tch::Device::Cpu)?.f_to_kind(DType::Double)?) };
    let (actual, expected) = (values(actual)?, values(expected)?);
    let equal = actual.f_eq_tensor(&expected)?;
    let error = actual.f_sub(&expected)?.f_abs()?.f_masked_fill(&equal, 0.0)?;
    let magnitude = expected.f_abs()?;
    // With an infinite expected value the bound would accept any finite value. A NaN makes `le` false.
    let bound = magnitude.f_mul_scalar(rtol)?.f_add_scalar(atol)?;
    let within = error.f_le_tensor(&bound)?.f_logical_and(&magnitude.f_isfinite()?)?.f_logical_or(&equal)?;
    let outside = actual.numel() as i64 - within.f_sum(DType::Int64)?.f_int64_value(&[])?;
    let relative = error.f_div(&magnitude)?.f_masked_fill(&magnitude.f_eq(0.0)?, 0.0)?.f_masked_fill(&equal, 0.0)?;
    let largest = |t: &Tensor| -> Result<f64> { Ok(t.f_max()?.f_double_value(&[])?) };
    let note = match outside {
        0 => String::new(),
        _ => {
            let nans = actual.f_isnan()?.f_sum(DType::Int64)?.f_int64_value(&[])?;
            let nans = if nans > 0 { format!(", {nans} of them NaN") } else { String::new() };
            let worst = furthest(&error.f_sub(&bound)?, &actual, &expected)?;
            format!("{outside} of {} elements outside the tolerance{nans}; the furthest {worst}", actual.numel())
        }
    };
    Ok((largest(&error)?, largest(&relative)?, note))
}

/// The element with the largest `excess`: "is 0.5 at [1, 2], expected 0.25". A NaN is larger than all.
pub fn furthest(excess: &Tensor, actual: &Tensor, expected: &Tensor) -> Result<String> {
    let at = excess.f_nan_to_num(f64::INFINITY, None, None)?.f_argmax(None, false)?.f_int64_value(&[])?;
    let value = |t: &Tensor| t.f_reshape([-1_i64])?.f_to_kind(DType::Double)?.f_double_value(&[at]);
    let mut rest = at;
    let mut place: Vec<i64> = excess.size().iter().rev().map(|&size| (rest % size, rest /= size).0).collect();
    place.reverse();
    Ok(format!("is {:.6} at {place:?}, expected {:.6}", value(actual)?, value(expected)?))
}

/// An error that lists what failed, or the largest absolute error of what passed.
pub fn require(comparisons: &[Comparison]) -> Result<f64> {
    let failed: Vec<_> = comparisons.iter().filter(|c| !c.passed).map(ToString::to_string).collect();
    ensure!(failed.is_empty(), "{} of {} comparisons failed:\n{}", failed.len(), comparisons.len(), failed.join("\n"));
    Ok(comparisons.iter().map(|c| c.max_abs_error).fold(0.0, f64::max))
}

/// Passes if every one of `cases`, a name and the bytes of its file, does. The bytes are part of the program, so that a
/// copied binary can run the check.
pub fn check(cases: &[(&str, &[u8])], run: impl Fn(&CaseFile) -> Result<Vec<Comparison>>) -> Result<Verdict> {
    let (mut compared, mut largest) = (0, 0f64);
    for (name, bytes) in cases {
        let comparisons = CaseFile::parse(bytes, Path::new(name)).and_then(|case| run(&case));
        let comparisons = comparisons.with_context(|| name.to_string())?;
        largest = largest.max(require(&comparisons).with_context(|| name.to_string())?);
        compared += comparisons.len();
    }
    Verdict::passed(format!("{compared} tensors, largest absolute error {largest:.1e}"))
}

#[cfg(test)]
mod tests;
