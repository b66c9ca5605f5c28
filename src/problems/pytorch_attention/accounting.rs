//! The memory accounting of plain attention, by formula: what the measured bytes are held against.

use anyhow::Result;
use serde::Serialize;
use serde_json::{Value, json};

/// The bytes that [`crate::attention::naive::attention`] needs, tensor by tensor.
///
/// With one score tensor of b T^2 elements and one row tensor of b T d: inputs are q, k, v and the upstream gradient.
/// Forward allocates Q K^T and its quotient by sqrt(d), frees the first, adds P, frees the second, adds o: at most two
/// score tensors and o at once. The graph keeps P. Backward holds P, dP and dS together, beside o and dv; where T is
/// shorter than d, its end is higher instead: o, dv, dq, dk, and dk once more on its way into k's own layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Accounting {
    pub batch: u64,
    pub seq: u64,
    pub d_model: u64,
    pub element_bytes: u64,
    pub score_bytes: u64,
    pub row_bytes: u64,
    pub input_bytes: u64,
    pub forward_peak_bytes: u64,
    pub saved_bytes: u64,
    pub before_backward_bytes: u64,
    pub backward_peak_bytes: u64,
}

impl Accounting {
    pub fn of(batch: u64, seq: u64, d_model: u64, element_bytes: u64) -> Self {
        let score_bytes = batch * seq * seq * element_bytes;
        let row_bytes = batch * seq * d_model * element_bytes;
        let input_bytes = 4 * row_bytes;
        Self {
            batch,
            seq,
            d_model,
            element_bytes,
            score_bytes,
            row_bytes,
            input_bytes,
            forward_peak_bytes: input_bytes + 2 * score_bytes + row_bytes,
            saved_bytes: score_bytes + row_bytes,
            before_backward_bytes: input_bytes + score_bytes + row_bytes,
            backward_peak_bytes: input_bytes + (3 * score_bytes + 2 * row_bytes).max(5 * row_bytes),
        }
    }

    pub fn peak_bytes(&self) -> u64 {
        self.forward_peak_bytes.max(self.backward_peak_bytes)
    }
}

/// The accounting of every cell that a suite here may hold, in the shape that the template's `one(...)` selects from.
pub fn facts() -> Result<Value> {
    let mut cells = Vec::new();
    for d_model in [16, 32, 64, 128] {
        for seq in (8..=16).map(|power| 1_u64 << power) {
            let accounting = Accounting::of(8, seq, d_model, 4);
            let (t, d) = (seq as f64, d_model as f64);
            let mut cell = serde_json::to_value(accounting)?;
            cell["params"] = json!({ "batch": 8, "seq": seq, "d_model": d_model });
            // d log(saved) / d log(T) of saved = b s (T^2 + T d).
            cell["saved_exponent"] = json!((2.0 * t + d) / (t + d));
            cell["inputs_and_output_bytes"] = json!(accounting.input_bytes + accounting.row_bytes);
            cells.push(cell);
        }
    }
    Ok(json!({ "accounting": cells }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_tensors_have_the_published_sizes() {
        // 2, 32, 512, 2048 and 8192 MiB at batch 8 in float32, and 256 MiB of q, k, v and o at d = 128, T = 16384.
        for (seq, mib) in [(256, 2), (1024, 32), (4096, 512), (8192, 2048), (16384, 8192)] {
            assert_eq!(Accounting::of(8, seq, 64, 4).score_bytes, mib << 20);
        }
        assert_eq!(Accounting::of(8, 16384, 128, 4).input_bytes, 256 << 20);
    }

    #[test]
    fn the_exponent_in_the_facts_is_the_slope_of_the_formula() {
        let facts = facts().unwrap();
        let cell = &facts["accounting"][3];
        let (t, d) = (cell["seq"].as_u64().unwrap(), cell["d_model"].as_u64().unwrap());
        let saved = |t: u64| (Accounting::of(8, t, d, 4).saved_bytes as f64).ln();
        let slope = (saved(t + 1) - saved(t - 1)) / ((t as f64 + 1.0).ln() - (t as f64 - 1.0).ln());
        assert!((cell["saved_exponent"].as_f64().unwrap() - slope).abs() < 1e-5);
    }
}
