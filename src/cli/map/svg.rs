//! The map as a picture: one SVG file that needs nothing else, with a title, labels and a legend. Pure.
//!
//! The colours are those of Okabe and Ito, which people with any colour vision can tell apart; each cell carries its mark
//! and its CPU's number all the same.

use std::fmt::Write;

use quick_xml::escape::escape;

use super::model::{Cache, Cell, Core, Map};
use super::role::Role;
use super::text::short;
use crate::cli::table::wrapped;
use crate::error::{counted, printable};

/// A hardware thread.
const CELL: usize = 26;
const CELL_HEIGHT: usize = 34;
/// Between things, and around them.
const GAP: usize = 6;
/// Above the things in a box, for its title.
const TITLE: usize = 20;
/// The cores in a cache's row, and the caches in a node's, are at most so wide.
const CORES: usize = 520;
const CACHES: usize = 1100;
/// A character of the legend, which is 80 columns wide, and a line of it.
const CHARACTER: usize = 8;
const LINE: usize = 20;

/// Background and text.
const TINTS: [(&str, &str); 7] = [
    ("#56b4e9", "#000"),
    ("#e69f00", "#000"),
    ("#009e73", "#000"),
    ("#f0e442", "#000"),
    ("#0072b2", "#fff"),
    ("#cc79a7", "#000"),
    ("#d55e00", "#000"),
];

/// Something drawn at the origin, with its size.
struct Drawing {
    svg: String,
    width: usize,
    height: usize,
}

/// The whole document.
pub(super) fn render(map: &Map<'_>) -> String {
    let per_row = map.cores_per_row(CORES, core_width);
    let sections = map.sections.iter().map(|section| {
        let caches = section.caches.iter().map(|cache| boxed(&cache.title, &cores(cache, per_row), "cache"));
        boxed(&section.title, &flow(caches, CACHES), "section")
    });
    let host = flow(sections, CACHES + 4 * GAP);
    let legend = legend(map);
    let width = host.width.max(legend.width) + 4 * GAP;
    let head = 44;
    let height = head + host.height + 3 * GAP + legend.height + 2 * GAP;
    let title = format!(
        "{}, {}",
        counted(u64::try_from(map.cells().count()).unwrap_or(u64::MAX), "CPU"),
        counted(u64::try_from(map.holders.len()).unwrap_or(u64::MAX), "lease")
    );
    let margin = 2 * GAP;
    let below = head + host.height + 3 * GAP;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         role=\"img\">\n<title>virt-pin map: {title}</title>\n<style>{STYLE}</style>\n{HATCH}\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<text class=\"head\" x=\"{margin}\" y=\"30\">virt-pin map: \
         {title}</text>\n{}{}</svg>\n",
        at(margin, head, &host.svg),
        at(margin, below, &legend.svg),
    )
}

const STYLE: &str = "text{font-family:sans-serif;font-size:13px;fill:#222}.head{font-size:18px;font-weight:bold}\
    .section{fill:#f4f4f4;stroke:#999}.cache{fill:#fff;stroke:#999}.core{fill:none;stroke:#444;stroke-width:1.5}\
    .mark{font-weight:bold;text-anchor:middle;font-size:14px}.number{text-anchor:middle;font-size:9px}\
    .name{font-weight:bold}.line{font-family:monospace;font-size:13px;white-space:pre}";

/// Lines over the colour of what is held and not used.
const HATCH: &str = "<defs><pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
    patternTransform=\"rotate(45)\"><rect width=\"3\" height=\"6\" fill=\"#fff\" fill-opacity=\"0.75\"/></pattern></defs>\n";

fn core_width(threads: usize) -> usize {
    threads * CELL + 2 * GAP
}

/// The cores of a cache in rows.
fn cores(cache: &Cache<'_>, per_row: usize) -> Drawing {
    let mut out = Drawing { svg: String::new(), width: 0, height: 0 };
    for row in cache.cores.chunks(per_row) {
        let row = flow(row.iter().map(core), usize::MAX);
        let y = if out.height == 0 { 0 } else { out.height + GAP };
        out.svg += &at(0, y, &row.svg);
        out.width = out.width.max(row.width);
        out.height = y + row.height;
    }
    out
}

/// The threads of a core in its frame; without one where it is unknown who belongs together.
fn core(core: &Core<'_>) -> Drawing {
    let (width, height) = (core.cells.len() * CELL + GAP, CELL_HEIGHT + GAP);
    let mut svg = String::new();
    if core.brackets.0 == '[' {
        svg += &format!("<rect class=\"core\" width=\"{width}\" height=\"{height}\" rx=\"4\"/>\n");
    }
    for (thread, x) in core.cells.iter().zip((GAP / 2..).step_by(CELL)) {
        svg += &at(x, GAP / 2, &cell(thread));
    }
    Drawing { svg, width, height }
}

fn cell(cell: &Cell<'_>) -> String {
    let held = cell.lease.map(|(lease, _)| format!(", {}", short(&lease.name))).unwrap_or_default();
    let words = format!("CPU {}: {}{held}", cell.cpu, cell.role.meaning());
    let mut svg = format!("<g><title>{}</title>", escape(words.as_str()));
    let ink = square(&mut svg, cell.role, cell.lease.map_or(0, |(_, tint)| tint));
    let middle = CELL / 2;
    let size = match cell.mark.len() {
        1 => 14,
        2 => 12,
        _ => 9,
    };
    let _ = writeln!(
        svg,
        "<text class=\"mark\" x=\"{middle}\" y=\"17\" style=\"fill:{ink};font-size:{size}px\">{}</text><text class=\"number\" \
         x=\"{middle}\" y=\"30\" style=\"fill:{ink}\">{}</text></g>",
        escape(cell.mark.as_str()),
        cell.cpu
    );
    svg
}

/// The square of a role; answers the colour of text on it.
fn square(svg: &mut String, role: Role, tint: usize) -> &'static str {
    let (tint, on_tint) = TINTS.get(tint % TINTS.len()).copied().unwrap_or(("#fff", "#000"));
    let (fill, ink, more) = match role {
        Role::Vcpu => (tint, on_tint, ""),
        Role::Parked => (tint, "#000", ""),
        Role::Extra => (tint, on_tint, " stroke=\"#000\" stroke-width=\"2\""),
        Role::Static => (tint, on_tint, " stroke=\"#000\" stroke-width=\"2\" stroke-dasharray=\"3 2\""),
        Role::Several | Role::Occupied => {
            ("#fff", "#000", " stroke=\"#000\" stroke-width=\"2\" stroke-dasharray=\"3 2\"")
        }
        Role::Free => ("#fff", "#222", " stroke=\"#777\""),
        Role::Withheld => ("#fff", "#222", " stroke=\"#777\" stroke-dasharray=\"3 2\""),
        Role::Housekeeping => ("#d0d0d0", "#222", ""),
        Role::Isolated => ("#555", "#fff", ""),
        Role::OutOfReach => ("#e8e8e8", "#222", " stroke=\"#777\" stroke-dasharray=\"3 2\""),
        Role::Offline => ("none", "#666", " stroke=\"#aaa\" stroke-dasharray=\"1 3\""),
    };
    let (width, height) = (CELL - 2, CELL_HEIGHT - 2);
    let mut rect = |fill: &str, more: &str| {
        let _ =
            write!(svg, "<rect x=\"1\" y=\"1\" width=\"{width}\" height=\"{height}\" rx=\"2\" fill=\"{fill}\"{more}/>");
    };
    rect(fill, more);
    if role == Role::Parked {
        rect("url(#hatch)", &format!(" stroke=\"{fill}\""));
    }
    ink
}

/// Drawings from left to right and then from top to bottom.
fn flow(drawings: impl Iterator<Item = Drawing>, most: usize) -> Drawing {
    let mut out = Drawing { svg: String::new(), width: 0, height: 0 };
    let (mut x, mut y) = (0, 0);
    for drawing in drawings {
        if x > 0 && x + drawing.width > most {
            (x, y) = (0, out.height + GAP);
        }
        out.svg += &at(x, y, &drawing.svg);
        out.width = out.width.max(x + drawing.width);
        out.height = out.height.max(y + drawing.height);
        x += drawing.width + GAP;
    }
    out
}

/// A drawing in a box with a title, which is cut where the box is too narrow for it; the whole one shows on pointing at it.
fn boxed(title: &str, content: &Drawing, class: &str) -> Drawing {
    const NARROWEST: usize = 130;
    let width = content.width.max(NARROWEST) + 2 * GAP;
    let height = content.height + TITLE + GAP;
    let room = (width - 2 * GAP) / 7;
    let cut = match title.chars().count() {
        count if count > room => title.chars().take(room.saturating_sub(3)).chain("...".chars()).collect(),
        _ => title.to_owned(),
    };
    let svg = format!(
        "<g><title>{}</title><rect class=\"{class}\" width=\"{width}\" height=\"{height}\" rx=\"4\"/><text x=\"{GAP}\" \
         y=\"15\">{}</text></g>\n{}",
        escape(title),
        escape(cut.as_str()),
        at(GAP, TITLE, &content.svg)
    );
    Drawing { svg, width, height }
}

/// The leases, and what the squares mean.
fn legend(map: &Map<'_>) -> Drawing {
    let mut svg = String::new();
    let mut y = 0;
    let name = map.holders.iter().map(|holder| short(&holder.lease.name).chars().count()).max().unwrap_or(0);
    for holder in &map.holders {
        let role = if holder.lease.plan().is_some() { Role::Vcpu } else { Role::Static };
        sample(&mut svg, y, role, holder.tint, &holder.mark);
        let head = format!("{:<name$}  {:<11}  ", short(&holder.lease.name), holder.state);
        for line in wrapped(&head, &holder.cpus()).lines() {
            words(&mut svg, y, line);
            y += LINE;
        }
        y += CELL_HEIGHT - LINE;
    }
    for (role, count) in map.roles() {
        // The leases speak for these.
        if !map.holders.is_empty() && matches!(role, Role::Vcpu | Role::Static) {
            continue;
        }
        sample(&mut svg, y, role, 0, &role.symbol().to_string());
        words(&mut svg, y, &format!("{} ({count})", role.meaning()));
        y += CELL_HEIGHT;
    }
    Drawing { svg, width: CELL + GAP + 80 * CHARACTER, height: y }
}

fn sample(svg: &mut String, y: usize, role: Role, tint: usize, mark: &str) {
    let mut square_svg = String::new();
    let ink = square(&mut square_svg, role, tint);
    let _ = write!(
        square_svg,
        "<text class=\"mark\" x=\"{}\" y=\"22\" style=\"fill:{ink}\">{}</text>",
        CELL / 2,
        escape(mark)
    );
    *svg += &at(0, y, &square_svg);
}

fn words(svg: &mut String, y: usize, text: &str) {
    let (x, y, text) = (CELL + GAP, y + 21, printable(text));
    let _ = writeln!(
        svg,
        "<text class=\"line\" xml:space=\"preserve\" x=\"{x}\" y=\"{y}\">{}</text>",
        escape(text.as_str())
    );
}

fn at(x: usize, y: usize, svg: &str) -> String {
    format!("<g transform=\"translate({x} {y})\">{svg}</g>\n")
}
