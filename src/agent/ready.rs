//! systemd's notification protocol, as much as a service needs that says when it is ready.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells the service manager, if one is named in the environment.
pub(super) fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let path = path.to_string_lossy().into_owned();
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    // A manager that does not listen will find out by its own time limit.
    let _ = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
}
