//! REST client of the running instance.

use crate::folder::{DEFAULT, Run};
use crate::local_http;
use anyhow::{Context, Result, anyhow, bail};
use penstock_fabric::local::API;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A running instance and the way to reach it.
pub struct Remote {
    agent: ureq::Agent,
    url: String,
    /// Sent with each request over TCP. None through the folder's socket, where the kernel reports the peer's
    /// user.
    token: Option<String>,
    /// The folder and its `run.json`. None with `--api`.
    folder: Option<(PathBuf, Run)>,
}

impl Remote {
    /// Finds the instance by the URL of `--api`, or by its folder. Fails if its process is dead.
    pub fn find(dir: Option<&PathBuf>, api: Option<&String>) -> Result<Self> {
        let config = ureq::Agent::config_builder().http_status_as_error(false).build();
        if let Some(url) = api {
            let token = std::env::var("PENSTOCK_TOKEN")
                .context("--api needs the instance's token in the variable PENSTOCK_TOKEN")?;
            let url = url.trim_end_matches('/').to_owned();
            return Ok(Self {
                agent: config.into(),
                url,
                token: Some(token.trim().to_owned()),
                folder: None,
            });
        }
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
        let agent = local_http::agent(config, dir.to_owned());
        let folder = Some((dir.to_owned(), run));
        Ok(Self { agent, url: local_http::URL.to_owned(), token: None, folder })
    }

    fn with_token<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    /// Sends a GET request. Fails with the message of a refusal.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let request = self.with_token(self.agent.get(format!("{}{path}", self.url)));
        read(request.call().map_err(|error| self.unreachable(error))?)
    }

    /// Sends a GET request and returns the body as text, at most 64 MiB.
    pub fn get_text(&self, path: &str) -> Result<String> {
        let request = self.with_token(self.agent.get(format!("{}{path}", self.url)));
        let mut response = request.call().map_err(|error| self.unreachable(error))?;
        if !response.status().is_success() {
            bail!("{path} gives status {}", response.status());
        }
        Ok(response.body_mut().with_config().limit(64 << 20).read_to_string()?)
    }

    /// The token for `--api`. None with a folder.
    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Process id of the instance. None with `--api`.
    pub fn pid(&self) -> Option<u32> {
        self.folder.as_ref().map(|(_, run)| run.pid)
    }

    /// Sends a POST request with a JSON body.
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T> {
        let request = self.with_token(self.agent.post(format!("{}{path}", self.url)));
        read(request.send_json(body).map_err(|error| self.unreachable(error))?)
    }

    /// Sends a DELETE request.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let request = self.with_token(self.agent.delete(format!("{}{path}", self.url)));
        read(request.call().map_err(|error| self.unreachable(error))?)
    }

    /// Adds to the error of a request what it says about the instance.
    fn unreachable(&self, error: ureq::Error) -> anyhow::Error {
        let Some((dir, run)) = &self.folder else {
            return anyhow!(error).context(format!("the instance at {} does not answer", self.url));
        };
        let of = format!("the instance of {} (process {})", dir.display(), run.pid);
        let kind = match &error {
            ureq::Error::Io(error) => Some(error.kind()),
            _ => None,
        };
        let said = match kind {
            _ if !run.is_alive() => format!("{of} has ended"),
            Some(ErrorKind::PermissionDenied) => {
                format!("{of} is another user's: its commands are for the folder's owner and for root")
            }
            Some(ErrorKind::NotFound) => format!(
                "{of} runs, but its socket {} is gone: `kill {}` stops it in order",
                dir.join(API).display(),
                run.pid
            ),
            _ => format!("{of} does not answer"),
        };
        anyhow!(error).context(said)
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
