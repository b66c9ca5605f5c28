//! What a rendering leaves in its folder.

use cs336::report;

use super::sample::{full, render};

#[test]
fn writing_leaves_whole_files_and_no_old_figure() {
    let dir = tempfile::tempdir().unwrap();
    let rendered = report::render(&full()).unwrap();
    report::write(dir.path(), &rendered, Some(b"pdf")).unwrap();
    let fewer = render("No figure.").unwrap();
    report::write(dir.path(), &fewer, None).unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("figures")).unwrap().count(), 0);
    assert_eq!(std::fs::read_to_string(dir.path().join("writeup.md")).unwrap(), fewer.markdown);
    assert_eq!(std::fs::read(dir.path().join("writeup.pdf")).unwrap(), b"pdf");
}

#[test]
fn no_file_of_a_folder_that_figures_links_to_is_removed() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(elsewhere.path().join("thesis.svg"), "").unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("figures")).unwrap();
    report::write(dir.path(), &render("No figure.").unwrap(), None).unwrap();
    assert!(elsewhere.path().join("thesis.svg").exists());
}

#[test]
fn two_that_write_one_report_at_once_remove_its_old_figures() {
    let (dir, rendered) = (tempfile::tempdir().unwrap(), render("No figure.").unwrap());
    let figures = dir.path().join("figures");
    std::fs::create_dir(&figures).unwrap();
    for _ in 0..5 {
        (0..2000).for_each(|number| std::fs::write(figures.join(format!("{number}.svg")), "").unwrap());
        std::thread::scope(|scope| {
            let writers = [(); 4].map(|()| scope.spawn(|| report::write(dir.path(), &rendered, None)));
            writers.into_iter().for_each(|writer| writer.join().unwrap().unwrap());
        });
        assert_eq!(std::fs::read_dir(&figures).unwrap().count(), 0);
    }
}
