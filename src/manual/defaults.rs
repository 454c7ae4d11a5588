//! The configuration that packages install: it says nothing yet, and all that may be said is there as a comment.

use crate::config::keys::{self, Doc};

const WIDTH: usize = 100;

/// The file's text.
pub(super) fn configuration() -> String {
    let mut out = "# Which CPUs virtual machines may have for their own; see virt-pin.toml(5). `virt-pin suggest` proposes values for this\n\
                   # host, `virt-pin check` says whether they hold. Nothing has to be restarted after a change.\n"
        .to_owned();
    let [(_, file), sections @ ..] = keys::all();
    for doc in &file {
        out.push('\n');
        out += &comment(doc.meaning);
        if let Some((_, keys)) = sections.iter().find(|(name, _)| doc.is_section() && *name == doc.name) {
            out += &format!("#[[{}]]\n", doc.name);
            keys.iter().for_each(|key| out += &line(key));
            // A policy may have every attribute; this is the one without which there is none.
            out += if doc.name == "domain" { "#policy = \"dedicated\"\n" } else { "" };
        } else if doc.name == "pinnable_cpus" {
            // The one line to be edited.
            out += &format!("{} = {}\n", doc.name, doc.default.unwrap_or_default());
        } else {
            out += &line(doc);
        }
    }
    out
}

fn line(doc: &Doc) -> String {
    doc.example.map(|example| format!("#{} = {example}\n", doc.name)).unwrap_or_default()
}

/// The text as comment lines.
fn comment(text: &str) -> String {
    let mut out = "#".to_owned();
    let mut width = 1;
    for word in text.split_whitespace() {
        if width + 1 + word.len() > WIDTH {
            out += "\n#";
            width = 1;
        }
        out += &format!(" {word}");
        width += 1 + word.len();
    }
    out + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::fragment::Fragment;
    use crate::cpuset::CpuSet;

    #[test]
    fn it_hands_out_no_cpu_and_what_it_shows_can_be_said() {
        let text = configuration();
        let silent = Fragment::parse("x", &text).unwrap();
        assert_eq!(silent, Fragment { pinnable: Some(CpuSet::new()), ..Fragment::default() });
        let spoken: String = text
            .lines()
            .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line).to_owned() + "\n")
            .collect();
        let spoken = Fragment::parse("x", &spoken).unwrap();
        assert!(spoken.command.is_some() && spoken.autostart_reserve.is_some() && spoken.repair_drift.is_some());
        assert_eq!((spoken.domains.len(), spoken.limits.len()), (1, 1));
        assert!(
            spoken.limits[0].names.is_some()
                && spoken.limits[0].max_vcpus.is_some()
                && !spoken.limits[0].deny.is_empty()
        );
        assert!(text.lines().all(|line| line.len() <= 120), "{text}");
    }
}
