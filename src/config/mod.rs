//! What the operator wrote: `/etc/virt-pin/virt-pin.toml` and its drop-ins, as validated [`settings::Settings`].
//!
//! [`fragment`] says what one file may contain and where each value stands, by the tables of [`keys`]; [`settings`] merges the files. Fails closed:
//! no file, no key or an empty value means that no CPU may be handed out, and a file that cannot be understood is an
//! error that names file, line and key, never a guess. Nothing here writes.

pub mod fragment;
pub mod keys;
pub mod limit;
pub mod settings;
