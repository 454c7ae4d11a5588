//! Who gets which CPUs: values in, a plan or a refusal out. Pure: no I/O, clock, randomness or hash order.

pub mod plan;
pub mod policy;
pub mod refusal;
pub mod request;
