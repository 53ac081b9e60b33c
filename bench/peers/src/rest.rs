//! A REST client for a running store, for frequent requests: a command would start a process each time.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;

/// Access to a running instance.
pub(crate) struct Rest {
    agent: ureq::Agent,
    url: String,
    token: String,
}

impl Rest {
    /// Reads the address and the token of the instance from the folder of its store.
    pub(crate) fn of(dir: &Path) -> Result<Self> {
        let read = |name: &str| {
            std::fs::read_to_string(dir.join(name)).with_context(|| format!("{name} cannot be read"))
        };
        let run: Value = serde_json::from_str(&read("run.json")?)?;
        let url = run["api_url"].as_str().context("run.json names the address")?.to_owned();
        let agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        Ok(Self { agent, url, token: format!("Bearer {}", read("token")?.trim()) })
    }

    pub(crate) fn get(&self, path: &str) -> Result<Value> {
        let request = self.agent.get(format!("{}{path}", self.url)).header("authorization", &self.token);
        answer(path, request.call()?)
    }

    pub(crate) fn post(&self, path: &str) -> Result<Value> {
        let request = self.agent.post(format!("{}{path}", self.url)).header("authorization", &self.token);
        answer(path, request.send_json(serde_json::json!({}))?)
    }
}

fn answer(path: &str, mut response: ureq::http::Response<ureq::Body>) -> Result<Value> {
    let status = response.status();
    let value: Value = response.body_mut().read_json().with_context(|| format!("{path} gives {status}"))?;
    ensure!(status.is_success(), "{path} gives {status}: {value}");
    Ok(value)
}
