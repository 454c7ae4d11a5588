//! The packages as files: what is in them, what their tools think of them, and for the rpm, what its scripts do in a root of its own.
//! The Debian package on real hosts is tested by `hostvm/packages.rs`. Skipped where the tools are not installed.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const HOOK: &str = "etc/libvirt/hooks/qemu.d/10-virt-pin";

/// What a command that must succeed prints.
#[track_caller]
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Whether programs are there; a line on the terminal where not.
fn there(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| {
        !Command::new("sh").args(["-c", "command -v \"$0\"", program]).output().unwrap().status.success()
    });
    if let Some(program) = missing {
        eprintln!("skipped: {program} is not installed");
    }
    missing.is_none()
}

fn built(kind: &str, release: &str, dir: &Path) -> String {
    let binaries = Path::new(env!("CARGO_BIN_EXE_virt-pin")).parent().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/package");
    let output =
        Command::new(script).arg(kind).arg(binaries).arg(dir).env("VIRT_PIN_RELEASE", release).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The files that `make install` installs, without what packages of a kind compress or put elsewhere.
fn installed() -> BTreeSet<String> {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("{}={}/{}", name, dir.path().display(), name.to_lowercase());
    let binaries = Path::new(env!("CARGO_BIN_EXE_virt-pin")).parent().unwrap().display().to_string();
    let build = format!("BUILD={binaries}");
    run("make", &["-C", env!("CARGO_MANIFEST_DIR"), "install", &path("DESTDIR"), &path("GENERATED"), &build]);
    let root = dir.path().join("destdir");
    // A configuration that is there stays.
    let config = root.join("etc/virt-pin/virt-pin.toml");
    fs::OpenOptions::new().append(true).open(&config).map(drop).unwrap();
    fs::remove_file(&config).unwrap();
    fs::hard_link(root.join("usr/share/doc/virt-pin/README.md"), &config).unwrap();
    run("make", &["-C", env!("CARGO_MANIFEST_DIR"), "install", &path("DESTDIR"), &path("GENERATED"), &build]);
    assert!(fs::read_to_string(&config).unwrap().starts_with("# virt-pin\n"));
    run("find", &[root.to_str().unwrap(), "-type", "f", "-printf", "/%P\n"]).lines().map(name).collect()
}

/// A file's name in every kind of package.
fn name(path: &str) -> String {
    let path = path.trim_end_matches(".gz").replace("/vendor-completions/", "/site-functions/");
    path.replace("/share/licenses/", "/share/doc/")
}

#[test]
fn the_debian_package_has_the_list_and_lintian_has_no_complaint() {
    if !there(&["dh", "dpkg-shlibdeps"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let package = built("deb", "1", dir.path());
    let listed = run("dpkg-deb", &["--contents", &package]);
    let files = listed.lines().filter(|line| !line.starts_with('d'));
    let found: BTreeSet<String> =
        files.map(|line| name(line.split_whitespace().last().unwrap().trim_start_matches('.'))).collect();
    // What Debian wants beside it.
    let doc = "/usr/share/doc/virt-pin/";
    let theirs = ["changelog", "copyright"].map(|name| format!("{doc}{name}"));
    let overrides = "/usr/share/lintian/overrides/virt-pin".to_owned();
    let mut expected = &installed() | &theirs.into_iter().chain([overrides]).collect();
    // Debian has them already; `copyright` says where.
    expected.retain(|path| !path.contains("/LICENSE-"));
    assert_eq!(found, expected);
    let depends = run("dpkg-deb", &["--field", &package, "Depends"]);
    for library in ["libc6 (", "libgcc-s1 (", "libvirt0 (", "libvirt-daemon-system ("] {
        assert!(depends.contains(library), "{depends}");
    }
    if there(&["lintian"]) {
        // Of errors, warnings and remarks each that is no complaint of ours has its reason in the overrides.
        let said = run("lintian", &["--fail-on", "none", "--display-info", &package]);
        assert!(!said.contains(" virt-pin: "), "{said}");
    }
}

/// A root in which a shell runs, and the programs of this build.
fn root(dir: &Path) -> PathBuf {
    let root = dir.join("root");
    let copy = "mkdir -p \"$0\" && cd / && for program in /bin/sh /bin/rm \"$1\"; do
        ldd \"$program\" | grep --only-matching '/[^ ]*'; done | sort -u | xargs cp --parents --dereference --target-directory=\"$0\" &&
        cp --parents --dereference /bin/sh /bin/rm \"$0\" && mkdir \"$0/dev\" && : >\"$0/dev/null\"";
    run("bash", &["-c", copy, root.to_str().unwrap(), env!("CARGO_BIN_EXE_virt-pin")]);
    root
}

#[test]
fn the_rpm_is_installed_upgraded_and_erased() {
    if !there(&["rpmbuild", "rpm"]) || !nix::unistd::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = ["1", "2"].map(|release| built("rpm", release, dir.path()));
    let listed = run(
        "rpm",
        &["--query", "--package", "--queryformat", "[%{FILEMODES:perms} %{FILEUSERNAME} %{FILENAMES}\n]", &first],
    );
    let files = listed.lines().filter(|line| !line.starts_with('d'));
    let found: BTreeSet<String> = files.map(|line| name(line.split(' ').next_back().unwrap())).collect();
    assert_eq!(found, installed());
    assert!(listed.lines().all(|line| line.split(' ').nth(1) == Some("root")), "{listed}");
    let licences = run("rpm", &["--query", "--package", "--licensefiles", &first]);
    assert_eq!(licences.lines().filter(|path| path.starts_with("/usr/share/licenses/virt-pin/LICENSE-")).count(), 3);
    let configuration = run("rpm", &["--query", "--package", "--configfiles", &first]);
    assert_eq!(configuration, "/etc/virt-pin/virt-pin.toml\n");
    let requires = run("rpm", &["--query", "--package", "--requires", &first]);
    assert!(
        requires.contains("libvirt.so.0()(64bit)") && requires.contains("libvirt-daemon-driver-qemu >= "),
        "{requires}"
    );

    let root = root(dir.path());
    let before = run("find", &[root.to_str().unwrap(), "-not", "-path", "*/.rpmdb*"]);
    let rpm = |arguments: &[&str]| {
        let output = Command::new("rpm").arg("--root").arg(&root).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() && !said.contains("virt-pin:") && !said.contains("scriptlet"),
            "{arguments:?}: {said}"
        );
    };
    rpm(&["--install", "--nodeps", &first]);
    let hook = root.join(HOOK);
    let program = fs::read(root.join("usr/lib/virt-pin/virt-pin-hook")).unwrap();
    assert!(fs::read(&hook).unwrap() == program, "another hook");
    assert_eq!(fs::metadata(&hook).unwrap().permissions().mode() & 0o7777, 0o755);
    let config = root.join("etc/virt-pin/virt-pin.toml");
    let edited = fs::read_to_string(&config).unwrap().replace("pinnable_cpus = \"\"", "pinnable_cpus = \"1\"");
    fs::remove_file(&config).unwrap();
    fs::copy(dir_file(&dir, "edited", &edited), &config).unwrap();

    rpm(&["--upgrade", "--nodeps", &second]);
    assert!(fs::read(&hook).unwrap() == program, "an upgrade takes the hook away");
    assert_eq!(fs::read_to_string(&config).unwrap(), edited);

    rpm(&["--erase", "virt-pin"]);
    assert!(!hook.exists() && !root.join("run/virt-pin").exists());
    // The edited configuration is kept by rpm under another name, and nothing else.
    assert!(config.with_extension("toml.rpmsave").exists());
    fs::remove_dir_all(root.join("etc/virt-pin")).unwrap();
    let after = run("find", &[root.to_str().unwrap(), "-not", "-path", "*/.rpmdb*"]);
    let (before, after): (BTreeSet<_>, BTreeSet<_>) = (before.lines().collect(), after.lines().collect());
    let left: Vec<_> = after.difference(&before).filter(|path| Path::new(path).is_file()).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn dir_file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::io::Write::write_all(&mut fs::File::create(&path).unwrap(), text.as_bytes()).unwrap();
    path
}
