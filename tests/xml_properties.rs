//! Properties of the rewriting over generated documents in odd formatting, and over golden inputs with damage done to
//! them: bytes outside the edits survive, a second run changes nothing, the output says the plan, and nothing but what
//! we own differs (all in `invariants::rewritten`). A document is rewritten or refused as invalid; nothing panics.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]

mod invariants;

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::select;
use virt_pin::alloc::plan::{GuestTopology, PlacedCell, Plan};
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::Request;
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::Code;
use virt_pin::xml::pin::Scope;
use virt_pin::xml::{Domain, former, read, text_of};

/// One of these texts.
fn any_of(texts: &[&str]) -> BoxedStrategy<String> {
    select(texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>()).boxed()
}

fn attribute(name: &'static str, value: BoxedStrategy<String>) -> BoxedStrategy<String> {
    let forms = [" N='V'", " N=\"V\"", "  N = 'V'", "\n      N='V'", "\tN\n=\n\"V\""];
    (any_of(&forms), value).prop_map(move |(form, value)| form.replace('N', name).replace('V', &value)).boxed()
}

/// An element without content, in one of the ways to write that. `tag` is its name and attributes.
fn empty(tag: BoxedStrategy<String>) -> BoxedStrategy<String> {
    let forms = ["<T/>", "<T />", "<T\n/>", "<T></N>", "<T> </N\n>", "<T><!-- > --></N>", "<T/> <!-- why -->"];
    (any_of(&forms), tag)
        .prop_map(|(form, tag)| {
            let name = tag.split_whitespace().next().unwrap().to_owned();
            form.replace('T', &tag).replace('N', &name)
        })
        .boxed()
}

fn cpuset() -> BoxedStrategy<String> {
    any_of(&["0", "1", "4", "04", " 5", "0-3,^1", "0&#45;1", "4,", "", "junk", "9999", "&quot;"])
}

fn pin() -> BoxedStrategy<String> {
    let number = || any_of(&["0", "1", "2", "3", "+1", "00", "17"]);
    prop_oneof![
        6 => empty(
            (attribute("vcpu", number()), attribute("cpuset", cpuset()), any::<bool>())
                .prop_map(|(vcpu, cpuset, swap)| format!("vcpupin{}", if swap { cpuset + &vcpu } else { vcpu + &cpuset }))
                .boxed()
        ),
        1 => empty(attribute("vcpu", number()).prop_map(|vcpu| format!("vcpupin{vcpu}")).boxed()),
        2 => empty(attribute("cpuset", cpuset()).prop_map(|cpuset| format!("emulatorpin{cpuset}")).boxed()),
        2 => empty(
            (attribute("iothread", number()), attribute("cpuset", cpuset()))
                .prop_map(|(iothread, cpuset)| format!("iothreadpin{iothread}{cpuset}"))
                .boxed()
        ),
        3 => any_of(&[
            "<shares>2048</shares>",
            "<global_quota>-1</global_quota>",
            "<vcpusched vcpus='0' scheduler='fifo' priority='1'/>",
            "<vcpusched vcpus=\"1\" scheduler=\"rr\" priority=\"2\"></vcpusched>",
            "<emulatorsched scheduler='batch'/>",
            "<cachetune vcpus='0'><vcpupin vcpu='0' cpuset='9'/></cachetune>",
            "<!-- <vcpupin vcpu='0' cpuset='9'/> -->",
            "<?vcpupin vcpu='0'?>",
            "<x:vcpupin xmlns:x='urn:x' vcpu='0' cpuset='9'/>",
            "<![CDATA[<vcpupin/>]]>",
            "text &amp; more",
        ]),
    ]
    .boxed()
}

/// A parent with these children, each after a separator.
fn parent(tag: &'static str, child: BoxedStrategy<String>, count: std::ops::Range<usize>) -> BoxedStrategy<String> {
    let separators =
        ["\n    ", "\n    ", "\n    ", "", " ", "\n\n\t", "\n    <!-- next -->\n    ", " <!-- last -->\n    "];
    let children = prop::collection::vec((any_of(&separators), child), count);
    (children, any_of(&["\n  ", "", " <!-- end -->"]))
        .prop_map(move |(children, end)| {
            let inside: String = children.into_iter().map(|(separator, child)| separator + &child).collect();
            let name = tag.split(' ').next().unwrap();
            format!("<{tag}>{inside}{end}</{name}>")
        })
        .boxed()
}

fn topology() -> BoxedStrategy<String> {
    let part = || any_of(&["1", "2", "04"]);
    let parts = (
        attribute("sockets", part()),
        prop::option::of(attribute("dies", part())),
        prop::option::of(attribute("clusters", any_of(&["1", "2", "x"]))),
        attribute("cores", part()),
        attribute("threads", part()),
    );
    empty(
        parts
            .prop_map(|(sockets, dies, clusters, cores, threads)| {
                [format!("topology{sockets}"), dies.unwrap_or_default(), clusters.unwrap_or_default(), cores, threads]
                    .concat()
            })
            .boxed(),
    )
}

fn numa() -> BoxedStrategy<String> {
    let size = || any_of(&[" memory='524288'", " memory=\"1\" unit='MB'", " unit='b' memory='1025'", " memory='0'"]);
    let ids = select(vec![["", ""], [" id='0'", " id='1'"], ["\tid='1'", " id=\"0\""]]);
    let vcpus = (any_of(&["", " cpus='0'"]), any_of(&["", " cpus='1'", " cpus='1-9'"]));
    prop_oneof![
        1 => empty(any_of(&["numa"])),
        2 => empty(size().prop_map(|size| format!("cell{size}")).boxed()).prop_map(|cell| format!("<numa>{cell}</numa>")),
        4 => (ids, vcpus, size(), size()).prop_map(|(ids, vcpus, first, second)| {
            format!("<numa>\n<cell{}{}{first}/><cell{}{}{second}/>\n</numa>", ids[0], vcpus.0, ids[1], vcpus.1)
        }),
    ]
    .boxed()
}

fn root_child() -> BoxedStrategy<String> {
    let vcpu_attributes = (
        prop::option::of(attribute("placement", any_of(&["static", "auto"]))),
        prop::option::of(attribute("cpuset", cpuset())),
        prop::option::of(attribute("current", any_of(&["1"]))),
    );
    let vcpu = (vcpu_attributes, any_of(&["1", "2", "3", "+4", "04", "<![CDATA[4]]>", "2<!-- two -->"])).prop_map(
        |((placement, cpuset, current), count)| {
            let attributes = [placement, cpuset, current].map(Option::unwrap_or_default).concat();
            format!("<vcpu{attributes}>{count}</vcpu>")
        },
    );
    let others = ["<model>EPYC</model>", "<feature name='x' policy='disable'/>", "<x:numa xmlns:x='urn:x'/>"];
    let cpu_child = prop_oneof![3 => topology(), 3 => any_of(&others), 2 => numa()];
    prop_oneof![
        3 => vcpu,
        3 => parent("cputune", pin(), 0..7),
        1 => empty(any_of(&["cputune", "cputune note='/>'"])),
        2 => parent("cpu mode='host-passthrough'", cpu_child.boxed(), 0..3),
        1 => empty(any_of(&["cpu", "cpu mode=\"host-model\""])),
        2 => any_of(&["<iothreads>2</iothreads>", "<iothreads> +1</iothreads>", "<iothreads/>"]),
        1 => any_of(&["<iothreadids><iothread id='3'/></iothreadids>", "<iothreadids/>"]),
        3 => any_of(&["<memory unit='KiB'>1048576</memory>", "<memory unit='b'>1048577</memory>", "<memory/>"]),
        1 => any_of(&["<memoryBacking><hugepages/></memoryBacking>", "<memoryBacking/>", "<memoryBacking> <locked/> </memoryBacking>"]),
        1 => any_of(&["<numatune><memory mode='strict' nodeset='0'/></numatune>", "<numatune/>"]),
        3 => any_of(&[
            "<os><type>hvm</type></os>",
            "<devices><vcpu>9</vcpu></devices>",
            "<devices><memory model='dimm'><target><size>1</size></target></memory></devices>",
            "<metadata><x:a xmlns:x='urn:x'><cputune><vcpupin vcpu='0' cpuset='9'/></cputune></x:a></metadata>",
            "<x:cputune xmlns:x='urn:x'/>",
            "<cputune xmlns='urn:x'><vcpupin vcpu='0' cpuset='9'/></cputune>",
            "<!-- <cputune/> -->",
        ]),
    ]
    .boxed()
}

fn document() -> impl Strategy<Value = String> {
    let roots = [
        "domain type='kvm'",
        "domain type=\"kvm\" xmlns:q='urn:q'",
        "domain\n  type='a>b'",
        "lv:domain xmlns:lv='urn:lv'",
        "domain",
    ];
    let prologues =
        ["", "", "\u{feff}", "<?xml version='1.0'?>", "<?xml version='1.0'?>\n", "<!-- <vcpu> -->\n", "\n  "];
    let root = select(roots.to_vec()).prop_flat_map(|root| parent(root, root_child(), 0..9));
    (any_of(&prologues), root, any_of(&["\n", "\r\n", " "]))
        .prop_map(|(prologue, root, newline)| format!("{prologue}{root}\n").replace('\n', &newline))
}

/// A plan for what the document asks for.
fn plan(request: &Request, seed: u16) -> Plan {
    let vcpus = request.vcpus;
    let set = |cpus: &[u16]| cpus.iter().map(|cpu| CpuId(*cpu)).collect::<CpuSet>();
    let threads = if seed % 2 == 0 && vcpus % 2 == 0 { 2 } else { 1 };
    let guest = GuestTopology { sockets: 1, dies: 1, cores: vcpus / threads, threads };
    let guest = if seed % 5 == 0 { GuestTopology { sockets: 1, dies: guest.cores, cores: 1, threads } } else { guest };
    let order = (0..vcpus).map(|vcpu| CpuId((vcpu * 5 + seed) % 64));
    let mixed = seed % 6 == 5;
    let own = |(vcpu, cpu)| Some(cpu).filter(|_| !mixed || vcpu % 2 == 0);
    let node = |id: usize| Some(NodeId(u16::try_from(id).unwrap() % 3 + 1)).filter(|_| seed % 13 != 0);
    Plan {
        vcpus: order.clone().enumerate().map(own).collect(),
        shared: if mixed { set(&[73]) } else { CpuSet::new() },
        memory_nodes: Some([NodeId(1), NodeId(2), NodeId(3)].into()).filter(|_| seed % 4 != 0),
        cells: cells(request, seed)
            .into_iter()
            .enumerate()
            .map(|(id, (vcpus, bytes))| PlacedCell { vcpus, bytes, node: node(id) })
            .collect(),
        iothreads: set(&[seed % 4, 71, 72]),
        guest: Some(guest).filter(|_| seed % 7 != 0),
        ..Plan::new(order, set(&[seed % 3, 70]))
    }
}

/// The document's own cells, or some to make: vCPUs and bytes.
fn cells(request: &Request, seed: u16) -> Vec<(CpuSet, Option<u64>)> {
    if !request.cells.is_empty() || seed % 3 == 0 {
        return request.cells.iter().map(|cell| (cell.vcpus.clone(), Some(cell.bytes))).collect();
    }
    let middle = request.vcpus / 2;
    let bytes = request.memory.filter(|_| seed % 17 != 0).map(|memory| memory.bytes);
    let first = bytes.map(|bytes| bytes / 3 / 1024 * 1024);
    let rest = bytes.zip(first).map(|(bytes, first)| bytes - first);
    let set = |vcpus: std::ops::Range<u16>| vcpus.map(CpuId).collect::<CpuSet>();
    vec![(set(0..middle), first), (set(middle..request.vcpus), rest)]
}

/// A realtime policy that gives CPUs to the same vCPUs as the plan.
fn realtime(plan: &Plan) -> Policy {
    let vcpus = (0..).zip(&plan.vcpus).filter(|(_, own)| own.is_some()).map(|(vcpu, _)| CpuId(vcpu));
    Policy { realtime: true, dedicated_vcpus: Some(vcpus.collect()), ..Policy::default() }
}

/// Rewrites, unless the document is refused as invalid; says which.
fn holds(text: &str, seed: u16, scope: Scope) -> bool {
    let refused = |error: virt_pin::error::Error| assert_eq!(error.code, Code::DomainInvalid, "{error} in\n{text}");
    let domain = match Domain::parse(text) {
        Ok(domain) => domain,
        Err(error) => {
            refused(error);
            return false;
        }
    };
    match read::request(&domain, Policy::default()) {
        Ok(request) if request.vcpus <= 64 => {
            let plan = plan(&request, seed);
            let out = invariants::rewritten(text, &plan, scope).map_err(refused);
            if let Ok(out) = &out {
                let realtime = Request { policy: realtime(&plan), ..request };
                let made = invariants::made_realtime(out, &realtime);
                made.map_err(|error| assert!(matches!(error.code, Code::DomainInvalid | Code::PolicyInvalid))).ok();
                // A shape is made of what the owner wrote, whose memory cells of ours need not add up to.
                let owner = former::restored(text).unwrap();
                let request = read::request(&Domain::parse(&owner).unwrap(), Policy::default()).unwrap();
                invariants::shaped(text, &self::plan(&request, seed)).unwrap();
            }
            out.is_ok()
        }
        Ok(_) => false,
        Err(error) => {
            refused(error);
            false
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn odd_documents(text in document(), seed in 0u16..64, everything in any::<bool>()) {
        let scope = if everything { Scope::Everything } else { Scope::PlacementOnly };
        prop_assume!(holds(&text, seed, scope));
    }

    #[test]
    fn damaged_documents(
        case in any::<prop::sample::Index>(),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, "[<>/='\"&;! \r\n\t0-9a-c:-]{0,3}", any::<bool>()), 1..4),
        seed in 0u16..64,
    ) {
        let mut text = case.get(&golden_inputs()).clone();
        for (at, length, new, twice) in cuts {
            let start = (0..=at.index(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap();
            let end = (start + length..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
            let old = if twice { text[start..end].repeat(2) } else { String::new() };
            text.replace_range(start..end, &(new + &old));
        }
        if let Ok(text) = text_of(text.into_bytes()) {
            holds(&text, seed, Scope::Everything);
        }
    }
}

fn golden_inputs() -> Vec<String> {
    let entries = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/xml")).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path().join("in.xml")).collect();
    paths.sort();
    paths.iter().filter_map(|path| text_of(fs::read(path).ok()?).ok()).collect()
}
