//! A domain document from end to end: what it asks for, its place on a host, and the document rewritten. The result is read as
//! the same domain, says the plan, and is not changed by a second run.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use virt_pin::alloc::check;
use virt_pin::config::settings::Settings;
use virt_pin::decision::{self, Situation, Wish};
use virt_pin::error::Code;
use virt_pin::host::description;
use virt_pin::host::root::Root;
use virt_pin::xml::pin::{self, Scope};
use virt_pin::xml::{self, Domain, read};

static HOST: LazyLock<Root> =
    LazyLock::new(|| description::parse(include_str!("../../tests/hosts/xeon-2s-smt.host")).unwrap());

fn settings() -> Settings {
    Settings::merge([("config", "pinnable_cpus = \"1-1023\"")]).unwrap()
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = xml::text_of(bytes.to_vec()) else { return };
    let Ok(domain) = Domain::parse(&text) else { return };
    let Ok(identity) = read::identity(&domain) else { return };
    let wish = match decision::wish(&HOST, &domain, &identity, &|| Ok(settings())) {
        Ok(Wish::Dedicated(wish)) => wish,
        Ok(_) => return,
        Err(error) => {
            assert!(error.render().chars().all(|c| c == '\n' || !c.is_control()), "{:?}", error.render());
            return;
        }
    };
    let situation = Situation::read(&HOST, &wish.settings, None).unwrap();
    let Ok(plan) = situation.plan(&wish, None, true, &mut |_| {}) else { return };
    check::check(&situation.supply(), &wish.request, &plan).unwrap();
    for scope in [Scope::Everything, Scope::PlacementOnly] {
        let edits = match pin::rewrite(&domain, &plan, scope) {
            Ok(edits) => edits,
            Err(error) => {
                assert_eq!(error.code, Code::DomainInvalid, "{}", error.message);
                continue;
            }
        };
        let written = edits.apply(&text);
        let again = Domain::parse(&written).unwrap_or_else(|error| panic!("{}: {written}", error.message));
        assert_eq!(read::identity(&again).unwrap(), identity);
        assert_eq!(read::vcpu_count(&again).unwrap(), read::vcpu_count(&domain).unwrap());
        assert_eq!(read::policy_attributes(&again).unwrap(), read::policy_attributes(&domain).unwrap());
        for (vcpu, cpus) in plan.vcpu_places() {
            assert_eq!(read::pins(&again).unwrap().vcpus.get(&vcpu), Some(&cpus), "{written}");
        }
        let twice = pin::rewrite(&again, &plan, scope).unwrap();
        assert!(twice.is_empty(), "a second run changes {twice:?} in {written}");
    }
});
