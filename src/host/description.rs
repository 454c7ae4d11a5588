//! A machine as one reviewable text file.
