//! `virt-pin suggest --write`: the proposal into the configuration of a host that hands out nothing yet. What an operator has set,
//! in whichever file, is never overwritten; everything else in the file stays as it is, to the byte.

use std::fs;
use std::io;
use std::path::Path;

use toml::de::DeTable;

use super::super::replace::{Access, replace};
use crate::config::settings::{MAIN_FILE, Settings};
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::host::root::Root;

const KEY: &str = "pinnable_cpus";

/// What became of the proposal, in words; `written` is whether the file has it now.
pub(super) struct Outcome {
    pub(super) written: bool,
    pub(super) message: String,
}

/// Writes `pinnable_cpus` down, if nothing is handed out so far.
///
/// # Errors
/// `config.invalid`: what is there cannot be understood. `host.io`: it cannot be written; the file is as it was.
pub(super) fn write(root: &Root, pinnable: &CpuSet) -> Result<Outcome> {
    let left = |why: String| Outcome { written: false, message: format!("Nothing was written: {why}.") };
    let now = Settings::read(root)?;
    if !now.pinnable.is_empty() {
        return Ok(left(format!("{KEY} is set already, to \"{}\"", now.pinnable)));
    }
    if pinnable.is_empty() {
        return Ok(left("no CPU can be spared".to_owned()));
    }
    let path = root.resolve(MAIN_FILE);
    let before = text_of(&path)?;
    let after = with_pinnable(&before, pinnable)?;
    let mut files = vec![(MAIN_FILE.to_owned(), after.clone())];
    for path in now.files.iter().filter(|path| *path != MAIN_FILE) {
        files.push((path.clone(), root.read(path)?));
    }
    let then = Settings::merge(files.iter().map(|(path, text)| (path.as_str(), text.as_str())))?;
    if then.pinnable != *pinnable {
        return Ok(left(format!("a file in {MAIN_FILE}.d says that {KEY} is empty, and it counts")));
    }
    put(&path, &after)?;
    Ok(Outcome {
        written: true,
        message: format!(
            "Written to {MAIN_FILE}. `virt-pin enable VM` gives a VM CPUs of its own from its next start on."
        ),
    })
}

/// The file's text, to the byte; none if it is not there.
fn text_of(path: &Path) -> Result<String> {
    match fs::read(path).map(String::from_utf8) {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => {
            let line = error.as_bytes().iter().take(error.utf8_error().valid_up_to()).filter(|byte| **byte == b'\n');
            let what = format!("{MAIN_FILE}, line {}: not UTF-8", line.count() + 1);
            Err(Error::new(Code::ConfigInvalid, what).with_hint("write it in UTF-8, as TOML is"))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(Error::io(Code::HostIo, "read", path, error)),
    }
}

/// The file's text with this value: in place of the one that it has, or as its first line.
fn with_pinnable(text: &str, pinnable: &CpuSet) -> Result<String> {
    let table = DeTable::parse(text).map_err(|error| {
        Error::new(Code::ConfigInvalid, format!("{MAIN_FILE}: not TOML: {}", error.message().replace('\n', ", ")))
    })?;
    let value = table.get_ref().iter().find(|(key, _)| key.get_ref() == KEY).map(|(_, value)| value.span());
    let value = value.and_then(|span| Some((text.get(..span.start)?, text.get(span.end..)?)));
    Ok(match value {
        Some((before, after)) => format!("{before}\"{pinnable}\"{after}"),
        None => format!("{KEY} = \"{pinnable}\"\n{text}"),
    })
}

/// A link stays one.
fn put(path: &Path, text: &str) -> Result<()> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let access = fs::metadata(&target).map_or(Access::Usual, Access::Of);
    // Not *.toml, and not in the directory of drop-ins: nobody reads it.
    replace(&target, &target.with_extension("toml.new"), text.as_bytes(), &access)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    fn make(path: &Path, text: &[u8]) {
        fs::File::create(path).unwrap().write_all(text).unwrap();
    }

    fn cpus(list: &str) -> CpuSet {
        CpuSet::parse_kernel_list(list).unwrap()
    }

    /// A root with these files, and what comes of writing "2-3" there.
    fn written(files: &[(&str, &str)]) -> (bool, String, Option<String>) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        for (name, text) in files {
            let path = root.resolve(&format!("/etc/virt-pin/{name}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            make(&path, text.as_bytes());
        }
        let outcome = write(&root, &cpus("2-3")).unwrap();
        let left: BTreeSet<_> =
            root.list("/etc/virt-pin").unwrap().into_iter().filter(|name| name.ends_with(".new")).collect();
        assert!(left.is_empty(), "{left:?}");
        (outcome.written, outcome.message, root.read_if_exists(MAIN_FILE).unwrap())
    }

    #[test]
    fn what_nobody_has_set_is_set_and_the_rest_stays() {
        for (before, after) in [
            ("", "pinnable_cpus = \"2-3\"\n"),
            ("# a\npinnable_cpus = \"\"  # b\n#c", "# a\npinnable_cpus = \"2-3\"  # b\n#c"),
            ("'pinnable_cpus'=''\r\nrepair_drift = true\r\n", "'pinnable_cpus'=\"2-3\"\r\nrepair_drift = true\r\n"),
            (
                "[[domain]]\nmatch = \"x\"\npolicy = \"shared\"\n",
                "pinnable_cpus = \"2-3\"\n[[domain]]\nmatch = \"x\"\npolicy = \"shared\"\n",
            ),
        ] {
            let (done, said, found) = written(&[("virt-pin.toml", before)]);
            assert!(done && said.contains(MAIN_FILE), "{said}");
            assert_eq!(found.as_deref(), Some(after));
        }
        assert_eq!(written(&[]).2.as_deref(), Some("pinnable_cpus = \"2-3\"\n"));
    }

    #[test]
    fn what_an_operator_has_set_is_left() {
        let (set, empty) = ("pinnable_cpus = \"5\"\n", "pinnable_cpus = \"\"\n");
        for (main, drop_in, why) in [
            (set, "", "is set already, to \"5\""),
            (empty, set, "is set already, to \"5\""),
            // Someone said explicitly that there are none.
            (empty, empty, "says that pinnable_cpus is empty"),
        ] {
            let (done, said, found) = written(&[("virt-pin.toml", main), ("virt-pin.toml.d/9.toml", drop_in)]);
            assert!(!done && said.contains(why), "{said}");
            assert_eq!(found.as_deref(), Some(main));
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(!write(&Root::directory(dir.path()), &CpuSet::new()).unwrap().written);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_cannot_be_understood_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        let path = root.resolve(MAIN_FILE);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        for text in [&b"pinnable_cpus = "[..], b"pinnable_cpus = ''\n# K\xf6ln\n"] {
            make(&path, text);
            assert_eq!(write(&root, &cpus("2-3")).err().unwrap().code, Code::ConfigInvalid);
            assert_eq!(fs::read(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_link_stays_one_and_a_mode_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path().join("root"));
        let (path, elsewhere) = (root.resolve(MAIN_FILE), dir.path().join("kept.toml"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        make(&elsewhere, b"");
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(write(&root, &cpus("2-3")).unwrap().written);
        assert!(fs::symlink_metadata(&path).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "pinnable_cpus = \"2-3\"\n");
        assert_eq!(fs::metadata(&elsewhere).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
