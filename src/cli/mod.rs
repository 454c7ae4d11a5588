//! What people and scripts see: one file per subcommand, each with the pure functions that render its answer.

pub mod topology;
