//! The names of repositories.

/// Longest part of a name that the Hub takes.
const MAX_PART: usize = 96;

/// `owner/name`, at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RepoId {
    pub(super) name: String,
    pub(super) revision: String,
}

impl RepoId {
    /// Reads `owner/name` or `owner/name@revision`. Whatever it gives is safe as part of a path and of a URL.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (owner, model) = name.split_once('/')?;
        // Branches have slashes.
        let valid = is_part(owner) && is_part(model) && revision.split('/').all(is_part);
        valid.then(|| Self {
            name: name.to_owned(),
            revision: revision.to_owned(),
        })
    }
}

impl std::fmt::Display for RepoId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.name, self.revision)
    }
}

fn is_part(part: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=MAX_PART).contains(&part.len())
        && part.chars().all(plain)
        && !part.starts_with(['.', '-'])
        && !part.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_and_without_a_revision_are_told_from_paths() {
        let parsed = |text| RepoId::parse(text).map(|id| (id.name, id.revision));
        let owned = |name: &str, revision: &str| Some((name.to_owned(), revision.to_owned()));
        assert_eq!(parsed("Qwen/Qwen3.5-0.8B"), owned("Qwen/Qwen3.5-0.8B", "main"));
        assert_eq!(parsed("a/b@refs/pr/3"), owned("a/b", "refs/pr/3"));
        for path in [
            "",
            "Qwen3.5-9B",
            "a/b/c",
            "./a",
            "../a",
            "/a",
            "a/",
            "a/..",
            "a/.b",
            "a/b@",
            "a/b@../c",
            "a/b@c/../d",
            "a\\b/c",
            "a b/c",
            "a/b?x",
            "a/b@c@d",
            "C:/x",
            "~/x",
        ] {
            assert_eq!(parsed(path), None, "{path}");
        }
    }
}
