//! CPUs of their own for libvirt/QEMU virtual machines.
//!
//! Reading order: [`cpuset`] and [`error`] (words and failures), [`host`] (the machine as a value), [`alloc`] (who gets
//! which CPUs: pure), [`xml`] (domain text to request, plan to edits: pure), [`config`], [`lock`] (the leases and the only
//! way to change them), [`relocate`] (a running VM to other CPUs), [`hook`] (one libvirt event in, one outcome out), [`agent`]
//! (what no hook can do), [`cli`], [`manual`] (its pages).

pub mod agent;
pub mod alloc;
pub mod cli;
pub mod conditions;
pub mod config;
pub mod cpuset;
pub mod decision;
pub mod definitions;
pub mod document;
pub mod enforce;
pub mod error;
pub mod failpoint;
pub mod hook;
pub mod host;
pub mod kept;
pub mod libvirt;
pub mod lock;
pub mod log;
pub mod manual;
pub mod relocate;
pub mod report;
pub mod uuid;
pub mod xml;
