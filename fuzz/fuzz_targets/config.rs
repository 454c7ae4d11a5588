//! A configuration file: read, or refused with its name and line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virt_pin::config::settings::Settings;
use virt_pin::error::Code;

fuzz_target!(|text: &str| {
    if let Err(error) = Settings::merge([("/etc/virt-pin/virt-pin.toml", text)]) {
        assert_eq!(error.code, Code::ConfigInvalid);
        assert!(error.message.starts_with("/etc/virt-pin/virt-pin.toml"), "{}", error.message);
        // What is shown to people has nothing in it that a terminal would obey.
        assert!(error.render().chars().all(|c| c == '\n' || !c.is_control()), "{:?}", error.render());
    }
});
