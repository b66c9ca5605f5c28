//! Compares structs of this crate with those that NVRTC sees in a file of `kernels/`: names, types, offsets and sizes.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};

use super::{DeviceStruct, Field};
use crate::cuda::jit::{Compiler, Program};
use crate::cuda::nvrtc;
use crate::cuda::toolchain::Toolchain;

/// The layout of a [`DeviceStruct`], for the comparison.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub name: &'static str,
    pub fields: &'static [Field],
    pub bytes: usize,
}

impl Layout {
    pub fn of<T: DeviceStruct>() -> Self {
        Self { name: T::NAME, fields: T::FIELDS, bytes: size_of::<T>() }
    }
}

/// Templates that test a field's type.
const HELPERS: &str = "
template <class A, class B> constexpr bool is_type = false;
template <class A> constexpr bool is_type<A, A> = true;
template <class T> constexpr bool is_pointer = false;
template <class T> constexpr bool is_pointer<T *> = true;
template <class T, int N> constexpr bool is_pointers = false;
template <class T, int N> constexpr bool is_pointers<T *[N], N> = true;
";

/// What a file of `kernels/` is expected to declare.
#[derive(Debug, Default)]
pub(crate) struct Expected {
    pub structs: Vec<Layout>,
    /// Entry points, by all of their parameters.
    pub kernels: Vec<Layout>,
    /// Conditions in C++ over the constants of the file.
    pub conditions: Vec<String>,
}

/// Compares `expected` with the text of `program` as NVRTC compiles it.
///
/// Errors: NVRTC's, which name the field or the condition; a kernel whose parameters lie elsewhere.
pub(crate) fn compare(program: &Program, expected: &Expected) -> Result<()> {
    compare_in(&Compiler::of_this_tree()?, program, expected).with_context(|| format!("kernels/{}", program.file))
}

fn compare_in(compiler: &Compiler, program: &Program, expected: &Expected) -> Result<()> {
    let mut source = compiler.read(program)?;
    source.text += HELPERS;
    for layout in &expected.structs {
        source.text += &assertions(layout);
    }
    for condition in &expected.conditions {
        writeln!(source.text, "static_assert({condition}, \"{condition}\");")?;
    }
    let defines = program.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}"));
    let includes =
        Toolchain::get()?.include.iter().map(|folder| format!("--include-path={}", folder.to_string_lossy()));
    let fixed = ["--gpu-architecture=compute_90a", "--std=c++20"].map(String::from);
    let options: Vec<String> = fixed.into_iter().chain(defines).chain(includes).collect();
    let ptx = nvrtc::ptx(&source, &options)?;
    expected.kernels.iter().try_for_each(|kernel| compare_parameters(kernel, &ptx).context(kernel.name))
}

/// C++ that compiles only if the struct of that name has these fields and no others. `__INTADDR__` is how the front end
/// of NVRTC implements `offsetof`, which NVRTC itself lacks.
fn assertions(layout: &Layout) -> String {
    let Layout { name, fields, bytes } = layout;
    let mut text = format!("static_assert(sizeof({name}) == {bytes}, \"bytes of {name}\");\n");
    for Field { name: field, offset, c_type, length, .. } in *fields {
        let member = format!("decltype({name}::{field})");
        let is_type = match (*c_type, length) {
            ("void *", None) => format!("is_pointer<{member}>"),
            ("void *", Some(length)) => format!("is_pointers<{member}, {length}>"),
            (_, Some(length)) => format!("is_type<{member}, {c_type}[{length}]>"),
            (_, None) => format!("is_type<{member}, {c_type}>"),
        };
        text += &format!("static_assert({is_type}, \"type of {name}::{field}\");\n");
        text += &format!(
            "static_assert(__INTADDR__(&static_cast<{name} *>(nullptr)->{field}) == {offset}, \"offset of {name}::{field}\");\n"
        );
    }
    // Binds every member: it does not compile with another number of members.
    let names: Vec<String> = (0..fields.len()).map(|i| format!("member{i}")).collect();
    text + &format!("__device__ inline void count({name} value) {{ auto &[{}] = value; }}\n", names.join(", "))
}

/// Offset and size of every parameter that `ptx` declares for the kernel.
fn compare_parameters(kernel: &Layout, ptx: &str) -> Result<()> {
    let expected: Vec<_> = kernel.fields.iter().map(|field| (field.offset, field.bytes)).collect();
    let actual = parameters(ptx, kernel.name).context("its parameters cannot be read from the PTX")?;
    ensure!(
        actual == expected,
        "its parameters are at (offset, bytes) {actual:?}, the struct's fields at {expected:?}"
    );
    Ok(())
}

/// (offset, bytes) of each parameter of an entry point: parameters follow one another, each at its alignment.
fn parameters(ptx: &str, kernel: &str) -> Option<Vec<(usize, usize)>> {
    let (_, rest) = ptx.split_once(&format!(".entry {kernel}("))?;
    let (list, _) = rest.split_once(')')?;
    let mut end = 0;
    list.split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
        .map(|text| {
            let (alignment, bytes) = parameter(text)?;
            let offset = usize::next_multiple_of(end, alignment);
            end = offset + bytes;
            Some((offset, bytes))
        })
        .collect()
}

/// Alignment and bytes of `.param .align 8 .b8 name[56]` or `.param .u64 .ptr .align 1 name`.
fn parameter(text: &str) -> Option<(usize, usize)> {
    let mut words = text.strip_prefix(".param")?.split_whitespace();
    match words.next()? {
        ".align" => {
            let alignment = words.next()?.parse().ok()?;
            let (_, bytes) = text.strip_suffix(']')?.rsplit_once('[')?;
            Some((alignment, bytes.parse().ok()?))
        }
        scalar => {
            let bits: usize = scalar.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().ok()?;
            Some((bits / 8, bits / 8))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Address;

    #[test]
    fn parameters_of_an_entry_point_are_read_from_ptx() {
        let ptx = ".visible .entry other(\n\t.param .u32 other_param_0\n)\n.visible .entry probe(\n\
                   \t.param .f32 probe_param_0,\n\t.param .u64 .ptr .align 1 probe_param_1,\n\
                   \t.param .align 128 .b8 probe_param_2[128],\n\t.param .align 8 .b8 probe_param_3[24]\n)\n.maxntid 256\n";
        assert_eq!(parameters(ptx, "probe").unwrap(), [(0, 4), (8, 8), (128, 128), (256, 24)]);
        assert_eq!(parameters(ptx, "none"), None);
    }

    kernel_params! {
        /// As in the kernel's text.
        struct Twin<'a> as "Twin" { n: i32, scale: f32, x: Address<'a>, table: [u32; 3] }
        struct Probe<'a> as "probe" { twin: Twin<'a>, n: i32 }
    }

    /// The error of `compare_in` for a struct with these members and a kernel with these parameters; empty if there is
    /// none.
    fn difference(members: &str, parameters: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let text = format!("struct Twin {{ {members} }};\nextern \"C\" __global__ void probe({parameters}) {{}}\n");
        std::fs::write(folder.path().join("probe.cu"), text).unwrap();
        let compiler =
            Compiler { kernels: folder.path().to_path_buf(), cache: folder.path().to_path_buf(), shipped: None };
        let program = Program { file: "probe.cu", defines: Vec::new() };
        let (structs, kernels) = (vec![Layout::of::<Twin>()], vec![Layout::of::<Probe>()]);
        let expected = Expected { structs, kernels, conditions: vec!["sizeof(int) == 4".into()] };
        compare_in(&compiler, &program, &expected).map_or_else(|error| format!("{error:#}"), |()| String::new())
    }

    #[test]
    fn a_field_or_parameter_that_differs_from_its_twin_is_named() {
        let (members, parameters) = ("int n; float scale; float *x; unsigned table[3];", "Twin twin, int n");
        assert_eq!(difference(members, parameters), "");
        for (members, parameters, expected) in [
            ("float n; float scale; float *x; unsigned table[3];", parameters, "type of Twin::n"),
            ("int n; float scale; float *x; unsigned table[4];", parameters, "type of Twin::table"),
            ("float scale; int n; float *x; unsigned table[3];", parameters, "offset of Twin::scale"),
            (
                "int n; float scale; float *x; unsigned table[3]; int hidden;",
                parameters,
                "there are more elements than there are binding names",
            ),
            (members, "int n, Twin twin", "probe: its parameters are at (offset, bytes) [(0, 4), (8, 32)]"),
            (members, "Twin twin, int n, float *x", "(40, 8)]"),
        ] {
            let error = difference(members, parameters);
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
