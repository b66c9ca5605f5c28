//! Characters that the report's fonts lack: the PDF prints their code points, so that there is one whatever a record says.

use super::*;

/// The document of a subject of this name, whose answer and figure have the name too.
fn named(name: &str) -> report::Rendered {
    let shown = report::escape::markdown(name);
    let text = format!("It says {shown}, **{shown}** and `{name}`.\n\n| {shown} |\n|---|\n| 1 |\n\nTable: {shown}");
    let mut input = whole(&format!("{text}\n\n{{{{ figure(\"bars\") }}}}"));
    input.answer.figure("bars", sample::bars()).unwrap();
    let mut rendered = report::render(&Document { subject: Some(name.into()), ..document(vec![input]) }).unwrap();
    // As a label would be.
    let figures = rendered.figures.iter_mut().map(|(_, svg)| svg);
    figures.for_each(|svg| *svg = String::from_utf8(svg.clone()).unwrap().replace("small", name).into_bytes());
    rendered
}

#[test]
fn a_report_with_letters_that_no_font_has_is_built() {
    // The last one is a letter and a mark that lie in different fonts.
    for name in ["张伟", "Łukasz Ğ", "أحمد", "😀", "Дмитрий", "नेहा", "김민준", "ℵ\u{64b}א\u{35c}ﷺ\u{301}"]
    {
        let rendered = named(name);
        assert!(rendered.markdown.contains(name), "{}", rendered.markdown);
        assert!(
            rendered.complete().and_then(|rendered| report::pdf(&rendered, WRITEUP)).is_ok_and(|pdf| !pdf.is_empty()),
            "{name}"
        );
    }
}

#[test]
fn the_pages_print_code_points_and_markdown_the_letters() {
    let rendered = body(format!("{} #raw({});", report::escape::typst("张 Д"), report::escape::typst_string("伟")));
    assert_eq!(text_of(&rendered), "‹U+5F20›Д‹U+4F1F›");
    assert!(named("张伟").markdown.contains("张伟"));
}

#[test]
fn the_fonts_have_every_character_of_the_accepted_report() {
    let rendered = report::render(&accepted()).unwrap();
    assert!(!text_of(&rendered).contains("‹U+"));
}
