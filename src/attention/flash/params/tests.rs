//! The structs against the kernels' own text, and the constants that the text and the host must share.

use super::*;
use crate::attention::flash::hopper::tile_config as hopper;
use crate::attention::flash::portable::tile_config as portable;
use crate::attention::flash::textbook;
use crate::attention::flash::variant::{Element, Variant};
use crate::cuda::layout::{Expected, Layout, compare};

fn conditions(list: &[(&str, u32)]) -> Vec<String> {
    list.iter().map(|(constant, value)| format!("{constant} == {value}")).collect()
}

#[test]
fn hoppers_forward_parameters_lie_as_its_kernels_declare_them() {
    use flash_forward::{Combine, Forward, Output, Parts, Problem, SplitForward};
    let variant = Variant { d: 64, element: Element::BFloat16, is_causal: true };
    for size in hopper::TileSize::ALL {
        let config = hopper::ForwardConfig::of(variant, size);
        let constants = [
            ("threads", config.threads()),
            ("rows", config.rows()),
            ("resident", config.resident()),
            ("columns", hopper::columns(config.variant)),
        ];
        let constants = conditions(&constants);
        let whole = Expected {
            structs: vec![Layout::of::<Problem>()],
            kernels: vec![Layout::of::<Forward>()],
            conditions: constants.clone(),
        };
        compare(&config.program(), &whole).unwrap();
        let split = Expected {
            structs: vec![Layout::of::<Problem>(), Layout::of::<Parts>(), Layout::of::<Output>()],
            kernels: vec![Layout::of::<SplitForward>(), Layout::of::<Combine>()],
            conditions: constants,
        };
        compare(&hopper::ForwardConfig { is_split: true, ..config }.program(), &split).unwrap();
    }
}

#[test]
fn hoppers_backward_parameters_lie_as_its_kernels_declare_them() {
    use flash_backward::{Backward, Combine, Finish, Outputs, Parts, Prepare, Problem, SplitBackward};
    for d in [64, 80, 96, 128] {
        let config = hopper::BackwardConfig::of(Variant { d, element: Element::BFloat16, is_causal: true });
        let constants = conditions(&[
            ("keys", hopper::BackwardConfig::KEYS),
            ("threads", hopper::BackwardConfig::THREADS),
            ("stages", hopper::BackwardConfig::STAGES),
            ("queries", config.queries),
            ("columns", hopper::columns(config.variant)),
            ("k_columns", config.key_columns()),
        ]);
        let shared = [Layout::of::<Prepare>(), Layout::of::<Finish>()];
        let whole = Expected {
            structs: vec![Layout::of::<Problem>(), Layout::of::<Outputs>()],
            kernels: [&shared[..], &[Layout::of::<Backward>()]].concat(),
            conditions: constants.clone(),
        };
        compare(&config.program(), &whole).unwrap();
        let split = Expected {
            structs: vec![Layout::of::<Problem>(), Layout::of::<Parts>()],
            kernels: [&shared[..], &[Layout::of::<SplitBackward>(), Layout::of::<Combine>()]].concat(),
            conditions: constants,
        };
        compare(&hopper::BackwardConfig { is_split: true, ..config }.program(), &split).unwrap();
    }
}

#[test]
fn the_portable_parameters_lie_as_their_kernels_declare_them() {
    let variant = Variant { d: 64, element: Element::Half, is_causal: true };
    let forward = portable::ForwardConfig::of(variant);
    let expected = Expected {
        structs: vec![Layout::of::<portable_forward::Tensor>(), Layout::of::<portable_forward::Problem>()],
        kernels: vec![Layout::of::<portable_forward::Forward>(), Layout::of::<portable_forward::Combine>()],
        conditions: conditions(&[("threads", forward.threads()), ("rows", forward.rows())]),
    };
    compare(&forward.program(), &expected).unwrap();
    use portable_backward::{Backward, Combine, Prepare, Problem, Split};
    let backward = portable::BackwardConfig::of(variant);
    let expected = Expected {
        structs: vec![Layout::of::<Split>(), Layout::of::<portable_forward::Tensor>(), Layout::of::<Problem>()],
        kernels: vec![Layout::of::<Prepare>(), Layout::of::<Backward>(), Layout::of::<Combine>()],
        conditions: conditions(&[("threads", backward.threads()), ("padding", portable::BackwardConfig::PADDING)]),
    };
    compare(&backward.program(), &expected).unwrap();
}

#[test]
fn the_textbook_parameters_lie_as_their_kernels_declare_them() {
    use textbook_backward::{Keys, Problem, Queries, Rowsums};
    let variant = Variant { d: 64, element: Element::Float, is_causal: true };
    let (forward, backward) = (textbook::TileConfig::forward(variant), textbook::TileConfig::backward(variant));
    let threads = || conditions(&[("groups", textbook::GROUPS), ("threads", textbook::THREADS)]);
    let kernels = vec![Layout::of::<textbook_forward::Forward>()];
    compare(&forward.program(), &Expected { structs: Vec::new(), kernels, conditions: threads() }).unwrap();
    let kernels = vec![Layout::of::<Rowsums>(), Layout::of::<Keys>(), Layout::of::<Queries>()];
    let structs = vec![Layout::of::<Problem>()];
    compare(&backward.program(), &Expected { structs, kernels, conditions: threads() }).unwrap();
}
