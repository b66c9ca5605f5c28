//! Measures a training step with the attention of the profile where the suite names none.

use anyhow::Result;
use serde_json::{Value, json};

use crate::bench::device::attention_for;
use crate::bench::training_step::{self, Params, Row};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;

pub struct BenchmarkingScript;

impl Measure for BenchmarkingScript {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;
    const KERNELS: &'static [&'static str] = training_step::KERNELS_WITH_PRODUCTS;

    fn kernels(params: &Params) -> &'static [&'static str] {
        training_step::kernels(params.execution, params.attention, params.dtype, params.products)
    }

    fn defaults(profile: Profile) -> Vec<(&'static str, Value)> {
        vec![("attention", json!(attention_for(profile)))]
    }

    fn fresh_process(params: &Params) -> bool {
        params.needs_fresh_process()
    }

    fn validate(params: &Params) -> Result<()> {
        params.validate()
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        Some(params.predicted_bytes(profile))
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        training_step::measure(params, profile)
    }
}

#[cfg(test)]
mod tests {
    use super::super::PROBLEM;
    use super::*;
    use crate::harness::suite;
    use crate::root;

    #[test]
    fn a_setting_that_no_case_of_the_suite_names_is_taken_or_refused_for_what_it_is() {
        let suite = suite::load(&root::find().unwrap(), &PROBLEM).unwrap().unwrap();
        let set = |settings: &[&str]| {
            let settings: Vec<_> = settings.iter().map(|setting| setting.to_string()).collect();
            suite::override_case(&suite, Profile::Gpu, &settings, &PROBLEM)
        };
        let fused = ["execution=fused", "attention=flash", "pass=training_step", "warmup=5"];
        let case = set(&[&fused[..], &["products=library"]].concat()).unwrap();
        assert_eq!(case["products"], "library");
        // The default leaves a case, and so its record, as it is.
        assert_eq!(set(&fused).unwrap(), set(&[&fused[..], &["products=fastest"]].concat()).unwrap());
        let message = |settings: &[&str]| format!("{:#}", set(settings).unwrap_err());
        assert!(message(&["products=slow"]).contains("unknown variant `slow`"));
        assert!(message(&["execution=eager", "products=library", "warmup=5"]).contains("execution must be fused"));
        assert!(message(&["prodcuts=fastest"]).contains("has no parameter \"prodcuts\"; it has allow_tf32, attention"));
    }
}
