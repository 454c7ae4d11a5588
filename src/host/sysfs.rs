//! Root -> Topology.
