//! Speaking REST with the running instance.

use crate::folder::{DEFAULT, Run};
use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A running instance.
pub struct Remote {
    agent: ureq::Agent,
    url: String,
    token: String,
    /// The process behind it, where the folder names it.
    run: Option<Run>,
}

impl Remote {
    /// Finds the instance by `--api` or by its folder.
    pub fn find(dir: Option<&PathBuf>, api: Option<&String>) -> Result<Self> {
        let (url, token, run) = match api {
            Some(url) => {
                let token = std::env::var("PENSTOCK_TOKEN")
                    .context("--api needs the instance's token in the variable PENSTOCK_TOKEN")?;
                (url.trim_end_matches('/').to_owned(), token, None)
            }
            None => {
                let dir = dir.map_or(Path::new(DEFAULT), PathBuf::as_path);
                let run = Run::load(dir)?;
                if !run.is_alive() {
                    bail!(
                        "the instance of {} (process {}) ended without stopping in order; `penstock up {}` starts it again",
                        dir.display(),
                        run.pid,
                        dir.display()
                    );
                }
                let token = std::fs::read_to_string(dir.join("token"))
                    .with_context(|| format!("the token in {} cannot be read", dir.display()))?;
                (run.api_url.clone(), token, Some(run))
            }
        };
        let agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        Ok(Self { agent, url, token: format!("Bearer {}", token.trim()), run })
    }

    /// GET.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let request = self.agent.get(format!("{}{path}", self.url)).header("authorization", &self.token);
        read(request.call().with_context(|| self.unreachable())?)
    }

    /// GET of plain text.
    pub fn get_text(&self, path: &str) -> Result<String> {
        let request = self.agent.get(format!("{}{path}", self.url)).header("authorization", &self.token);
        let mut response = request.call().with_context(|| self.unreachable())?;
        if !response.status().is_success() {
            bail!("{path} gives status {}", response.status());
        }
        Ok(response.body_mut().with_config().limit(64 << 20).read_to_string()?)
    }

    /// The token that it sends.
    pub fn token(&self) -> &str {
        self.token.strip_prefix("Bearer ").unwrap_or(&self.token)
    }

    /// The process behind it, where the folder names it.
    pub fn pid(&self) -> Option<u32> {
        self.run.as_ref().map(|run| run.pid)
    }

    /// POST with a body.
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T> {
        let request = self.agent.post(format!("{}{path}", self.url)).header("authorization", &self.token);
        read(request.send_json(body).with_context(|| self.unreachable())?)
    }

    /// DELETE.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let request = self.agent.delete(format!("{}{path}", self.url)).header("authorization", &self.token);
        read(request.call().with_context(|| self.unreachable())?)
    }

    fn unreachable(&self) -> String {
        match &self.run {
            Some(run) if !run.is_alive() => {
                format!("the instance at {} (process {}) has ended", self.url, run.pid)
            }
            _ => format!("the instance at {} does not answer", self.url),
        }
    }
}

fn read<T: DeserializeOwned>(mut response: ureq::http::Response<ureq::Body>) -> Result<T> {
    let status = response.status();
    let value: Value =
        response.body_mut().with_config().limit(64 << 20).read_json().context("the answer is no JSON")?;
    match status.is_success() {
        true => Ok(serde_json::from_value(value)?),
        false => {
            Err(anyhow!("{}", value["error"].as_str().unwrap_or("the instance refused without a reason")))
        }
    }
}
