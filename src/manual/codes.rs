//! virt-pin-codes(7): each code with a real message, what it means, where to look and what to do, from the table of codes and
//! the [`guide`](super::guide).

use super::guide::{Entry, entry};
use super::pages::see_also;
use super::roff::Page;
use crate::error::Code;

/// The page.
pub(super) fn page() -> String {
    let mut page = Page::new("virt-pin-codes", "7", "what the errors of virt-pin mean, and what to do about them");
    page.heading("DESCRIPTION");
    page.text(
        "Every error of virt-pin(1) and virt-pin-hook(8) has a code that never changes, and that code an exit status. The first line \
         says what was asked, what was found and where; lines below it give causes and numbers; the hint says what to do.",
    );
    page.paragraph(
        "`virsh start` shows the hook's error after \"unexpected exit status\" and that number. Events that may not fail a VM \
         (`release`, `reconnect`, `restore`) only write it to the journal: `journalctl -t virt-pin CODE=cpu.placement.shortage`. \
         `virt-pin --json` prints it as an object on stdout.",
    );
    page.paragraph(
        "`virt-pin help CODE`, or the exit status in place of the code, prints one of the entries below. Symptoms that have no code \
         are in docs/troubleshooting.md of the package.",
    );
    page.heading("CODES");
    for code in Code::all() {
        one(&mut page, code, entry(code));
    }
    see_also(&mut page, "virt-pin-codes(7)");
    page.finish()
}

fn one(page: &mut Page, code: Code, entry: &Entry) {
    let capital = |text: &str| text.chars().next().map(char::to_uppercase).into_iter().flatten().collect::<String>();
    let meaning = code.meaning();
    let meaning =
        capital(meaning) + meaning.get(meaning.chars().next().map_or(0, char::len_utf8)..).unwrap_or_default();
    page.subheading(&format!("{code} (exit status {})", code.exit()));
    page.text(&format!("{meaning}."));
    let (command, lines) = entry.message();
    page.quote([command].into_iter().chain(lines));
    page.paragraph(entry.means);
    page.paragraph("To find out more:");
    page.list(entry.look);
    page.paragraph("What to do:");
    page.list(entry.remedies);
    page.paragraph(&format!("Does it go away by itself? {}", entry.passes));
}
