//! How one talks with QEMU and with the guest agent: JSON, a line each way, on a Unix socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// One connection.
pub(crate) struct Wire {
    stream: BufReader<UnixStream>,
}

impl Wire {
    /// Connects; an answer may take so long.
    pub(crate) fn connect(socket: &Path, patience: Duration) -> std::io::Result<Wire> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(patience))?;
        Ok(Wire { stream: BufReader::new(stream) })
    }

    /// Asks, and waits for the answer; greetings and events in between are of no interest.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let failed = |error: String| format!("{command}: {error}");
        let request = match arguments {
            Value::Null => json!({ "execute": command }),
            arguments => json!({ "execute": command, "arguments": arguments }),
        };
        self.stream
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .map_err(|error| failed(error.to_string()))?;
        loop {
            let mut answer = self.line().map_err(failed)?;
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {error}"));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }
    /// Waits for an event.
    pub(crate) fn event(&mut self, name: &str) -> Result<(), String> {
        while self.line().map_err(|error| format!("{name}: {error}"))?["event"] != name {}
        Ok(())
    }

    fn line(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Err(error) => Err(error.to_string()),
            Ok(0) => Err("the other side is gone".to_owned()),
            Ok(_) => serde_json::from_str(&line).map_err(|error| format!("{error}: {line}")),
        }
    }
}

/// The bytes behind a base64 text, which is how JSON carries them.
pub(crate) fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{text:?} is not base64"),
    };
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'=').map(digit).collect();
    let bytes = digits.chunks(4).flat_map(|group| {
        let bits = (0..4).fold(0, |bits, at| bits << 6 | u32::from(group.get(at).copied().unwrap_or(0)));
        bits.to_be_bytes()[1..group.len()].to_vec()
    });
    bytes.collect()
}

#[test]
fn bytes_come_out_of_base64() {
    let texts = [("", ""), ("eA==", "x"), ("eHk=", "xy"), ("eHl6", "xyz"), ("w6kKfn4/", "é\n~~?")];
    assert_eq!(texts.map(|(text, _)| String::from_utf8(base64(text)).unwrap()), texts.map(|(_, bytes)| bytes));
}
