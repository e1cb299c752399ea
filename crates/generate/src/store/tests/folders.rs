//! What a store leaves in a folder, and takes from one.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use recant_core::persist::CacheFile;
use tempfile::TempDir;

use super::*;

type Edit = fn(&mut CacheFile);

fn filled() -> (PromptStore, TempDir) {
    let store = store(PLENTY);
    for (tokens, next) in [
        (text(0, 20), 1),
        (text(0, 9), 2),
        ([text(0, 14), text(3, 4)].concat(), 3),
    ] {
        let state = StoredState {
            caches: cold(&tokens),
            drafter: Some(drafter("head", &tokens, next)),
        };
        store.put(MODEL, &tokens, state).expect("a put");
    }
    store.put(MODEL, &text(5, 7), plain(&text(5, 7))).expect("a put");
    (store, tempfile::tempdir().expect("a folder"))
}

/// When each file of a folder was written.
fn files(folder: &Path) -> BTreeMap<String, SystemTime> {
    let entries = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry"));
    entries
        .map(|entry| {
            let written = entry.metadata().expect("metadata").modified().expect("a time");
            (entry.file_name().to_string_lossy().into_owned(), written)
        })
        .collect()
}

#[test]
fn saving_twice_writes_nothing_and_putting_more_writes_only_that() {
    let (store, folder) = filled();
    let written = store.save(folder.path()).expect("a save");
    let before = files(folder.path());
    assert_eq!(written, before.len());
    assert_eq!(store.save(folder.path()).expect("a save"), 0);
    assert_eq!(files(folder.path()), before);
    // A store that loaded them writes nothing either.
    let loaded = self::store(PLENTY);
    assert_eq!(loaded.load(folder.path()).expect("a load"), 4);
    assert_eq!(loaded.stats().bytes, store.stats().bytes);
    assert_eq!(loaded.save(folder.path()).expect("a save"), 0);
    assert_eq!(loaded.load(folder.path()).expect("a load"), 4);
    assert_eq!(loaded.stats().bytes, store.stats().bytes);
    // One more at the end of a text: its rows, and its entry.
    store
        .put(MODEL, &text(5, 12), plain(&text(5, 12)))
        .expect("a put");
    assert_eq!(store.save(folder.path()).expect("a save"), 2);
    let after = files(folder.path());
    assert!(before.iter().all(|(name, time)| after.get(name) == Some(time)));
    // One in the middle: the rows are cut in two, so two files take the place of one.
    store.put(MODEL, &text(5, 3), plain(&text(5, 3))).expect("a put");
    assert_eq!(store.save(folder.path()).expect("a save"), 3);
    assert_eq!(files(folder.path()).len(), after.len() + 2);
    let loaded = self::store(PLENTY);
    assert_eq!(loaded.load(folder.path()).expect("a load"), 6);
    for prompt in [
        text(0, 30),
        text(5, 30),
        text(5, 8),
        [text(0, 14), text(3, 5)].concat(),
    ] {
        assert_cold(&longest(&loaded, &prompt, 30).expect("a hit"), &prompt);
    }
    audit(&loaded);
}

#[test]
fn entries_that_are_gone_are_removed_from_the_folder_and_nothing_else_is() {
    let (store, folder) = filled();
    let foreign = ["notes.txt", "model.safetensors", "x.prompt", "other.partial"];
    for name in foreign {
        std::fs::write(folder.path().join(name), "kept").expect("a file");
    }
    store.save(folder.path()).expect("a save");
    // What a call that was cut off leaves.
    let unfinished = folder.path().join("00.prompt.safetensors.1-0.partial");
    std::fs::write(&unfinished, "half").expect("a file");
    let loaded = self::store(PLENTY);
    assert_eq!(loaded.load(folder.path()).expect("a load"), 4);
    store.clear();
    store.put(MODEL, &text(7, 3), plain(&text(7, 3))).expect("a put");
    assert_eq!(store.save(folder.path()).expect("a save"), 2);
    let names = files(folder.path());
    assert_eq!(names.len(), 2 + foreign.len());
    assert!(foreign.iter().all(|name| names.contains_key(*name)));
    let loaded = self::store(PLENTY);
    assert_eq!(loaded.load(folder.path()).expect("a load"), 1);
}

#[test]
fn a_damaged_file_is_named_and_nothing_is_stored() {
    let (store, folder) = filled();
    store.save(folder.path()).expect("a save");
    let other = self::store(PLENTY);
    other.put(MODEL, &text(9, 5), plain(&text(9, 5))).expect("a put");
    let before = other.stats();
    for name in files(folder.path()).keys() {
        let path = folder.path().join(name);
        let whole = std::fs::read(&path).expect("a file");
        let mut flipped = whole.clone();
        let last = flipped.len() - 1;
        flipped[last] ^= 4;
        for damaged in [&whole[..whole.len() / 2], &[], b"{}", &flipped] {
            std::fs::write(&path, damaged).expect("a file");
            let error = other.load(folder.path()).expect_err("a refusal").to_string();
            assert!(error.contains(name.as_str()), "{error}");
            assert_eq!(other.stats(), before);
        }
        // A file that is gone: rows are missed by the entry that needs them, an entry by nobody.
        std::fs::remove_file(&path).expect("a removal");
        let fresh = self::store(PLENTY);
        let loaded = fresh.load(folder.path());
        std::fs::write(&path, &whole).expect("a file");
        let holds = CacheFile::read(&path).expect("a file").notes["holds"].clone();
        match loaded {
            Ok(_) => assert_eq!(holds, "entry"),
            Err(error) => {
                assert_eq!(holds, "rows");
                assert!(error.to_string().contains("needs rows of its tokens"), "{error}");
                assert_eq!(fresh.stats(), Default::default());
            }
        }
    }
    assert_eq!(other.load(folder.path()).expect("a load"), 4);
    audit(&other);
}

#[test]
fn forged_files_are_refused_by_name() {
    let (store, folder) = filled();
    store.save(folder.path()).expect("a save");
    let edits: [(&str, Edit); 12] = [
        ("lacks the note `tree`", |file| {
            file.notes.remove("tree");
        }),
        ("lacks the note `holds`", |file| {
            file.notes.remove("holds");
        }),
        ("holds `all`", |file| {
            file.notes.insert("holds".into(), "all".into());
        }),
        ("has `-1` in a note", |file| {
            file.notes.insert("ahead".into(), "-1".into());
        }),
        ("has `99999999999` in a note", |file| {
            file.notes.insert("told".into(), "1 99999999999".into());
        }),
        ("tokens for", |file| {
            file.notes.insert("ahead".into(), "4000000000".into());
        }),
        ("tokens for", |file| {
            file.notes.insert("told".into(), "1 2 3".into());
        }),
        ("needs rows", |file| file.tokens[0] ^= 1),
        ("needs rows", |file| file.model.push('x')),
        ("needs rows", |file| {
            file.notes.insert("tree".into(), "another".into());
        }),
        ("does not go together", |file| {
            let (n, whole) = (file.tokens.len(), cold(&file.tokens));
            let fewer = Snapshot::new("stack", n).with_parts(whole.parts()[..1].to_vec());
            file.caches = fewer.after(n).expect("a piece");
        }),
        ("tokens for", |file| {
            file.caches = cold(&file.tokens);
        }),
    ];
    for name in files(folder.path()).keys() {
        let path = folder.path().join(name);
        let good = CacheFile::read(&path).expect("a file");
        if good.notes["holds"] != "entry" {
            continue;
        }
        for (index, (says, edit)) in edits.iter().enumerate() {
            let mut file = good.clone();
            edit(&mut file);
            file.write(&path).expect("a write");
            let fresh = self::store(PLENTY);
            let error = fresh.load(folder.path()).expect_err("a refusal").to_string();
            assert!(error.contains(says), "edit {index}: {error}");
            assert!(error.contains(name.as_str()), "edit {index}: {error}");
            assert_eq!(fresh.stats(), Default::default());
        }
        good.write(&path).expect("a write");
    }
}

#[test]
fn rows_that_lie_about_themselves_do_no_more_than_be_refused() {
    let (store, folder) = filled();
    store.save(folder.path()).expect("a save");
    let edits: [Edit; 6] = [
        |file| {
            file.notes.insert("ahead".into(), "4294967295".into());
        },
        |file| {
            file.notes.insert("told".into(), "5 5 5".into());
        },
        |file| {
            file.notes.insert("holds".into(), "entry".into());
        },
        |file| {
            file.caches = Snapshot::new("stack", file.tokens.len());
        },
        |file| {
            file.caches = cold(&file.tokens);
        },
        |file| file.beside = Some(cold(&[1, 2])),
    ];
    for name in files(folder.path()).keys() {
        let path = folder.path().join(name);
        let good = CacheFile::read(&path).expect("a file");
        if good.notes["holds"] != "rows" || good.tokens.is_empty() {
            continue;
        }
        for edit in edits {
            let mut file = good.clone();
            edit(&mut file);
            file.write(&path).expect("a write");
            let fresh = self::store(PLENTY);
            if fresh.load(folder.path()).is_err() {
                assert_eq!(fresh.stats(), Default::default());
            }
            audit(&fresh);
        }
        good.write(&path).expect("a write");
    }
}

#[test]
fn a_smaller_store_takes_what_fits_and_evicts_nothing_for_it() {
    let (store, folder) = filled();
    store.save(folder.path()).expect("a save");
    let own = 5 * ROW + LAST;
    for budget in (own..own + 2 * store.stats().bytes).step_by(97) {
        let small = self::store(budget);
        small.put(MODEL, &text(9, 5), plain(&text(9, 5))).expect("a put");
        let loaded = small.load(folder.path()).expect("a load");
        let stats = small.stats();
        assert_eq!((stats.entries, stats.evictions), (1 + loaded, 0), "{budget}");
        assert!(audit(&small) <= budget && small.contains(MODEL, &text(9, 5)));
        for prompt in [text(0, 30), text(5, 30)] {
            if let Some(hit) = longest(&small, &prompt, 30) {
                assert_cold(&hit, &prompt);
            }
        }
    }
}

#[test]
fn entries_of_another_model_are_kept_for_that_one() {
    let (store, folder) = filled();
    store
        .put("another", &text(0, 20), plain(&text(0, 20)))
        .expect("a put");
    store.save(folder.path()).expect("a save");
    let loaded = self::store(PLENTY);
    assert_eq!(loaded.load(folder.path()).expect("a load"), 5);
    let found = |model: &str, tokens: &[u32]| loaded.contains(model, tokens);
    assert!(found("another", &text(0, 20)) && found(MODEL, &text(0, 20)));
    assert!(!found("another", &text(0, 9)) && found(MODEL, &text(0, 9)));
    assert_eq!(loaded.stats().bytes, store.stats().bytes);
}

#[test]
fn a_folder_that_is_none_is_an_error() {
    let (store, folder) = filled();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").expect("a file");
    for path in [&file, &file.join("inside")] {
        assert!(store
            .save(path)
            .expect_err("a refusal")
            .to_string()
            .contains("file"));
        assert!(store
            .load(path)
            .expect_err("a refusal")
            .to_string()
            .contains("file"));
    }
    let absent = folder.path().join("a").join("b");
    assert!(store.load(&absent).is_err());
    assert!(store.save(&absent).expect("a save") > 0);
    assert_eq!(store.stats().entries, 4);
    assert!(matches!(store.load(&file), Err(crate::Error::Store { .. })));
}
