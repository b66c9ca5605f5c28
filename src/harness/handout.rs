//! The handout (Spring 2025, version 1.0.4): 21 problems, 107 points, and what each part must hand in.
//!
//! The questions are our paraphrase, complete enough that a reader of the report needs no handout. The handout gives
//! points per problem only; their division among lettered parts is ours.

use std::sync::LazyLock;

use serde::{Deserialize, Deserializer, Serialize};

/// Read once and never freed. An alias, because serde would borrow a field of type `&str` from the file's text.
type Text = &'static str;

/// One problem as the handout poses it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandoutProblem {
    /// The handout's identifier, which is also the name of the module, suite, template and record.
    #[serde(deserialize_with = "text")]
    pub name: Text,
    /// A heading for people.
    #[serde(deserialize_with = "text")]
    pub title: Text,
    /// The handout's section number, such as "1.1.3".
    #[serde(deserialize_with = "text")]
    pub section: Text,
    /// The problem's points in the handout: the sum over its parts.
    pub points: f64,
    #[serde(rename = "part", deserialize_with = "list")]
    pub parts: &'static [Part],
}

/// One deliverable of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The handout's letter, or "" where a problem has no letters.
    #[serde(deserialize_with = "text")]
    pub id: Text,
    /// The part's share of the problem's points, by our division.
    pub points: f64,
    #[serde(deserialize_with = "list")]
    pub kinds: &'static [DeliverableKind],
    /// Our paraphrase, in Markdown, on one line.
    #[serde(deserialize_with = "text")]
    pub question: Text,
}

/// What a part hands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeliverableKind {
    Code,
    Table,
    Written,
    Image,
    Equations,
}

/// All problems in the handout's order: `handout.toml`, read once.
pub static HANDOUT: LazyLock<&'static [HandoutProblem]> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct Handout {
        problem: Vec<HandoutProblem>,
    }
    let handout: Handout = toml::from_str(include_str!("handout.toml")).expect("handout.toml is part of this program");
    handout.problem.leak()
});

/// In one line.
fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Text, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(text.split_whitespace().collect::<Vec<_>>().join(" ").leak())
}

fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<&'static [T], D::Error> {
    Ok(Vec::deserialize(deserializer)?.leak())
}

/// The problem of that name, if the handout has one.
pub fn by_name(name: &str) -> Option<&'static HandoutProblem> {
    HANDOUT.iter().find(|p| p.name == name)
}

/// The points of the whole assignment.
pub fn total_points() -> f64 {
    HANDOUT.iter().map(|p| p.points).sum()
}

impl HandoutProblem {
    /// The part with this letter ("" where the problem has no letters).
    pub fn part(&self, id: &str) -> Option<&'static Part> {
        self.parts.iter().find(|p| p.id == id)
    }
}

impl DeliverableKind {
    /// One lowercase word for tables and `cs336 list`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Code => "code",
            Self::Table => "table",
            Self::Written => "written",
            Self::Image => "image",
            Self::Equations => "equations",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn twenty_one_problems_make_107_points() {
        assert_eq!(HANDOUT.len(), 21);
        assert_eq!(total_points(), 107.0);
    }

    #[test]
    fn parts_sum_to_their_problem_and_are_lettered_in_order() {
        for problem in HANDOUT.iter() {
            let sum: f64 = problem.parts.iter().map(|p| p.points).sum();
            assert_eq!(sum, problem.points, "{}", problem.name);
            let letters: Vec<&str> = problem.parts.iter().map(|p| p.id).collect();
            let expected = ["a", "b", "c", "d", "e"];
            assert!(letters == [""] || letters == expected[..letters.len()], "{}: {letters:?}", problem.name);
        }
    }

    #[test]
    fn every_part_says_what_is_asked_and_what_is_handed_in() {
        for problem in HANDOUT.iter() {
            assert!(!problem.title.is_empty(), "{}", problem.name);
            for part in problem.parts {
                assert!(!part.kinds.is_empty() && part.points > 0.0, "{} {}", problem.name, part.id);
                let question = part.question;
                assert!(question.len() > 60 && question.ends_with(['.', '?']), "{} {}", problem.name, part.id);
                assert!(!question.contains("  ") && !question.contains('\n'), "{} {}", problem.name, part.id);
            }
        }
    }

    #[test]
    fn names_are_unique_and_sections_ascend() {
        let names: BTreeSet<&str> = HANDOUT.iter().map(|p| p.name).collect();
        assert_eq!(names.len(), HANDOUT.len());
        let number = |section: &str| -> Vec<u32> { section.split('.').map(|n| n.parse().unwrap()).collect() };
        assert!(HANDOUT.is_sorted_by_key(|p| number(p.section)));
    }

    #[test]
    fn lookups_find_existing_problems_and_parts_only() {
        assert_eq!(by_name("flash_forward").and_then(|p| p.part("b")).map(|p| p.points), Some(8.0));
        assert!(by_name("flash_forward").and_then(|p| p.part("")).is_none());
        assert!(by_name("leaderboard").is_none());
    }
}
