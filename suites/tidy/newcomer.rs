//! The newcomer's example in `suites/newcomer` has the files and the imports of a registered problem.

use std::fs;

use cs336::problems::REGISTRY;

use super::{below, named_after, root, rust_files};

const EXAMPLE: &str = "suites/newcomer";
const NAME: &str = "harmonic_sum";

#[test]
fn the_newcomers_example_keeps_the_rules_of_a_problem() {
    let folder = root().join(EXAMPLE);
    let sources = folder.join("src/problems").join(NAME);
    for file in ["mod.rs", "measure.rs", "answer.rs", "checks.rs"] {
        assert!(sources.join(file).is_file(), "{EXAMPLE} lacks {file}");
    }
    assert!(
        folder.join(format!("suites/{NAME}.toml")).is_file() && folder.join(format!("templates/{NAME}.md")).is_file()
    );
    let (allowed, problems) = (below("problems"), REGISTRY.iter().map(|p| p.name).collect::<Vec<_>>());
    assert!(!problems.contains(&NAME), "{NAME} is an example, and no problem of the handout");
    for file in rust_files(&sources) {
        let text = fs::read_to_string(&file).unwrap();
        for used in named_after(&text, "crate::") {
            assert!(allowed.contains(used), "{} uses crate::{used}, which is not below problems", file.display());
        }
        let other = named_after(&text, "super::").into_iter().find(|name| problems.contains(name));
        assert_eq!(other, None, "{} imports another problem", file.display());
    }
}
