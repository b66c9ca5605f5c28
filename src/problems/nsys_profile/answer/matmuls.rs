//! Part (b): what each matmul kernel of a forward pass computes, told from how often it is launched.

use super::super::summary::RangeWork;
use super::Profiled;
use crate::bench::kernels::Class;
use crate::harness::answer::format::listed;

/// The matmuls of each layer that have weights of one shape.
const OF_EACH_LAYER: [&[&str]; 3] = [&["$W_1$", "$W_3$"], &["$W_q$", "$W_k$", "$W_v$", "$W_o$"], &["$W_2$"]];
/// Those and the output head, which runs once.
const SHAPES: usize = OF_EACH_LAYER.len() + 1;

/// The launches of each matmul kernel in some work.
fn launches(work: &RangeWork) -> Vec<(&str, u64)> {
    let matmuls = work.kernels.iter().filter(|kernel| kernel.class == Class::Matmul);
    matmuls.map(|kernel| (kernel.name.as_str(), kernel.count)).collect()
}

/// Each matmul kernel of a forward pass with what it computes: "$W_1$, $W_3$ and $QK^\top$ (48 each)".
///
/// The profile's ranges tell the kernels of $QK^\top$ and $PV$. The other launches are linear layers, and matmuls of one
/// shape run on one kernel. Empty where no assignment of shapes to kernels gives the launches counted, or several do.
pub fn computed<'a>(profile: &Profiled<'a>) -> Vec<(&'a str, String)> {
    let layers = profile.params().size.size().num_layers.unsigned_abs();
    let attention = &profile.row.attention;
    let ranges = [("$QK^\\top$", launches(&attention.scores)), ("$PV$", launches(&attention.final_matmul))];
    let kernels = launches(profile.inference());
    let in_range = |kernel: &str, range: &[(&str, u64)]| {
        range.iter().filter(|(name, _)| *name == kernel).map(|(_, launches)| launches).sum::<u64>()
    };
    let linear: Vec<u64> = kernels
        .iter()
        .map(|(name, all)| all.saturating_sub(ranges.iter().map(|(_, range)| in_range(name, range)).sum()))
        .collect();
    let once_a_layer =
        ranges.iter().all(|(_, range)| range.iter().map(|(_, launches)| launches).sum::<u64>() == layers);
    let Some(kernel_of) = only_assignment(layers, &linear).filter(|_| once_a_layer) else { return Vec::new() };
    let what = |(at, (kernel, _)): (usize, &(&'a str, u64))| {
        let shapes = OF_EACH_LAYER.iter().zip(kernel_of).filter(|(_, to)| *to == at);
        let of_attention = ranges.iter().filter(|(_, range)| in_range(kernel, range) > 0).map(|(name, _)| *name);
        let names: Vec<&str> = shapes.flat_map(|(names, _)| names.iter().copied()).chain(of_attention).collect();
        (*kernel, words(&names, layers, kernel_of[SHAPES - 1] == at))
    };
    kernels.iter().enumerate().map(what).collect()
}

fn words(names: &[&str], layers: u64, head: bool) -> String {
    let of_layers = match names {
        [] => None,
        [one] => Some(format!("{one} ({layers})")),
        _ => Some(format!("{} ({layers} each)", listed(names))),
    };
    let parts = of_layers.into_iter().chain(head.then(|| "the output head (1)".into()));
    parts.collect::<Vec<_>>().join(", and ")
}

/// For each shape the one kernel that computes it; none unless exactly one assignment gives the kernels' launches.
fn only_assignment(layers: u64, launches: &[u64]) -> Option<[usize; SHAPES]> {
    let [expansion, projections, contraction] = OF_EACH_LAYER.map(|names| names.len() as u64 * layers);
    let counts = [expansion, projections, contraction, 1];
    let n = launches.len();
    let assignments = (0..n.pow(4)).map(|i| [i % n, i / n % n, i / n.pow(2) % n, i / n.pow(3)]);
    let given = |kernel_of: &[usize; SHAPES], at: usize| -> u64 {
        kernel_of.iter().zip(counts).filter(|(to, _)| **to == at).map(|(_, count)| count).sum()
    };
    let mut fitting =
        assignments.filter(|kernel_of| launches.iter().enumerate().all(|(at, n)| given(kernel_of, at) == *n));
    fitting.next().filter(|_| fitting.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_tell_which_shapes_a_kernel_computes() {
        // 48 layers: the first kernel runs W1 and W3, the second all others, the third nothing linear.
        assert_eq!(only_assignment(48, &[96, 241, 0]), Some([0, 1, 1, 1]));
        // Split matmuls launch more, and two kernels of equal counts could be exchanged.
        assert_eq!(only_assignment(48, &[192, 241, 0]), None);
        assert_eq!(only_assignment(2, &[4, 8, 3]), Some([0, 1, 2, 2]));
        assert_eq!(only_assignment(1, &[1, 1, 6]), None, "W2 and the output head");
        assert_eq!(only_assignment(48, &[]), None);
    }

    #[test]
    fn what_a_kernel_computes_reads_as_a_list() {
        assert_eq!(words(&["$W_1$", "$W_3$", "$QK^\\top$"], 48, false), "$W_1$, $W_3$ and $QK^\\top$ (48 each)");
        assert_eq!(words(&["$PV$"], 48, false), "$PV$ (48)");
        assert_eq!(words(&["$W_2$"], 48, true), "$W_2$ (48), and the output head (1)");
    }
}
