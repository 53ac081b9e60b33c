//! HTTP: routes, who may ask, and the thread that serves it.
#![allow(clippy::disallowed_methods)]

use crate::instance::{Instance, Job, Task};
use crate::{metrics, openapi};
use axum::extract::{Path as UrlPath, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use penstock_node::AdminError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

/// Longest body of a request.
const BODY_LIMIT_BYTES: usize = 64 << 10;

/// The API does not come up.
#[derive(Debug)]
pub struct ServerError(pub String);

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ServerError {}

#[derive(Clone)]
struct Api {
    worker: UnboundedSender<Task>,
    token: String,
    address: SocketAddr,
}

/// A listener that is bound and not served yet.
pub struct Server {
    listener: std::net::TcpListener,
    address: SocketAddr,
}

struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(json!({ "error": self.1 }))).into_response()
    }
}

impl From<AdminError> for Refusal {
    fn from(error: AdminError) -> Self {
        let status = match error {
            AdminError::NotFound(_) => StatusCode::NOT_FOUND,
            AdminError::Refused(_) => StatusCode::CONFLICT,
            AdminError::Array(_) | AdminError::Meta(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

type Answer<T> = Result<Json<T>, Refusal>;

impl Server {
    /// Binds a loopback port; 0 takes any that is free.
    pub fn bind(port: u16) -> Result<Self, ServerError> {
        let wanted = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let fail = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::AddrInUse => ServerError(format!(
                "port {port} is in use by another program: name another one with --port, or none for any free one"
            )),
            _ => ServerError(format!("listening on {wanted}: {error}")),
        };
        let listener = std::net::TcpListener::bind(wanted).map_err(fail)?;
        listener.set_nonblocking(true).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        Ok(Self { listener, address })
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Serves on a thread of its own until the process ends. `on_signal` is called for SIGINT and SIGTERM.
    pub fn serve(
        self,
        token: String,
        worker: UnboundedSender<Task>,
        on_signal: impl Fn() + Send + 'static,
    ) -> Result<(), ServerError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| ServerError(format!("no runtime for the API: {error}")))?;
        let api = Api { worker, token, address: self.address };
        let body = move || {
            runtime.block_on(async move {
                let signals = crate::signals::watch(on_signal);
                let served = async {
                    let listener = tokio::net::TcpListener::from_std(self.listener)?;
                    axum::serve(listener, router(api)).await
                };
                let (served, ()) = tokio::join!(served, signals);
                if let Err(error) = served {
                    tracing::error!(%error, "the API stopped");
                }
            });
        };
        std::thread::Builder::new()
            .name("api".into())
            .spawn(body)
            .map(|_| ())
            .map_err(|error| ServerError(format!("no thread for the API: {error}")))
    }
}

fn router(api: Api) -> Router {
    Router::new()
        .route("/v1/openapi.json", get(|| async { Json(openapi::document()) }))
        .route("/v1/status", get(status))
        .route("/v1/latency", get(latency))
        .route("/v1/events", get(events))
        .route("/v1/drives", get(drives))
        .route("/v1/drives/{id}", get(drive))
        .route("/v1/drives/{id}/fail", post(drive_fail))
        .route("/v1/drives/{id}/replace", post(drive_replace))
        .route("/v1/arrays", get(arrays))
        .route("/v1/arrays/{id}", get(array))
        .route("/v1/arrays/{id}/rebuild", post(array_rebuild))
        .route("/v1/arrays/{id}/scrub", post(array_scrub))
        .route("/v1/fs", get(filesystems))
        .route("/v1/fs/{name}", get(filesystem))
        .route("/v1/fs/{name}/check", post(fs_check))
        .route("/v1/fs/{name}/damaged", get(fs_damaged))
        .route("/v1/mounts", get(mounts).post(mount).delete(unmount))
        .route("/v1/jobs/{id}", get(job))
        .route("/v1/down", post(down))
        .route("/metrics", get(prometheus))
        .fallback(|| async {
            Refusal(StatusCode::NOT_FOUND, "no such path; /v1/openapi.json lists them".into())
        })
        .layer(from_fn_with_state(api.clone(), admit))
        .with_state(api)
}

/// Lets a request in that names this listener, comes from no other site, and has the token.
async fn admit(State(api): State<Api>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let names = [api.address.to_string(), format!("localhost:{}", api.address.port())];
    let host_fits = text(header::HOST).is_some_and(|host| names.iter().any(|name| name == host));
    let origin_fits =
        text(header::ORIGIN).is_none_or(|origin| names.iter().any(|name| format!("http://{name}") == origin));
    if !host_fits || !origin_fits {
        return Refusal(StatusCode::FORBIDDEN, "Host or Origin does not name this listener".into())
            .into_response();
    }
    if !has_token(headers, &api.token) {
        let why = "a token is needed: Authorization: Bearer followed by the contents of the file `token`";
        return Refusal(StatusCode::UNAUTHORIZED, why.into()).into_response();
    }
    // A request is read to its end before it is answered: an answer to one whose body is still on its way would make
    // the HTTP server close the connection under the client's next request.
    let (parts, body) = request.into_parts();
    match axum::body::to_bytes(body, BODY_LIMIT_BYTES).await {
        Ok(bytes) => next.run(Request::from_parts(parts, bytes.into())).await,
        Err(error) => Refusal(StatusCode::BAD_REQUEST, format!("the body: {error}")).into_response(),
    }
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some(sent) = sent.and_then(|value| value.strip_prefix("Bearer ")) else { return false };
    // Every byte is compared, whatever came before.
    let differ = sent.bytes().zip(token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b));
    sent.len() == token.len() && differ == 0
}

impl Api {
    /// Runs `task` on the worker and brings its result.
    async fn on_worker<T, F>(
        &self,
        task: impl FnOnce(Rc<Instance>) -> F + Send + 'static,
    ) -> Result<T, Refusal>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, AdminError>> + 'static,
    {
        let (reply, result) = oneshot::channel();
        let task: Task = Box::new(move |instance| {
            Box::pin(async move {
                // Whoever asked may be gone.
                let _ = reply.send(task(instance).await);
            })
        });
        let gone = || Refusal(StatusCode::SERVICE_UNAVAILABLE, "the instance is stopping".into());
        self.worker.send(task).map_err(|_| gone())?;
        Ok(result.await.map_err(|_| gone())??)
    }

    async fn look<T: Serialize + Send + 'static>(
        &self,
        look: impl FnOnce(&Rc<Instance>) -> Result<T, AdminError> + Send + 'static,
    ) -> Answer<T> {
        self.on_worker(move |instance| async move { look(&instance) }).await.map(Json)
    }
}

async fn status(State(api): State<Api>) -> Answer<penstock_node::StatusReport> {
    api.look(|instance| Ok(instance.status())).await
}

async fn latency(State(api): State<Api>) -> Answer<Vec<penstock_node::LatencyReport>> {
    api.look(|instance| Ok(instance.latencies())).await
}

#[derive(Deserialize)]
struct After {
    #[serde(default)]
    after: u64,
}

async fn events(State(api): State<Api>, Query(query): Query<After>) -> Answer<Vec<penstock_node::Event>> {
    api.on_worker(move |instance| async move { instance.events_after(query.after).await }).await.map(Json)
}

async fn drives(State(api): State<Api>) -> Answer<Vec<penstock_node::DriveReport>> {
    api.look(|instance| Ok(instance.node().drive_reports())).await
}

async fn drive(State(api): State<Api>, UrlPath(id): UrlPath<String>) -> Answer<penstock_node::DriveReport> {
    api.look(move |instance| instance.node().show_drive(&id)).await
}

async fn drive_fail(
    State(api): State<Api>,
    UrlPath(id): UrlPath<String>,
) -> Answer<penstock_node::DriveReport> {
    api.on_worker(move |instance| async move { instance.node().fail_drive(&id).await }).await.map(Json)
}

#[derive(Default, Deserialize)]
struct ReplaceBody {
    path: Option<String>,
}

async fn drive_replace(
    State(api): State<Api>,
    UrlPath(id): UrlPath<String>,
    body: Option<Json<ReplaceBody>>,
) -> Answer<penstock_node::DriveReport> {
    let path = body.and_then(|Json(body)| body.path);
    let replace =
        move |instance: Rc<Instance>| async move { instance.replace_drive(&id, path.as_deref()).await };
    api.on_worker(replace).await.map(Json)
}

async fn arrays(State(api): State<Api>) -> Answer<Vec<penstock_node::ArrayReport>> {
    api.look(|instance| Ok(instance.node().array_reports(instance.node().arrays()))).await
}

async fn array(State(api): State<Api>, UrlPath(id): UrlPath<String>) -> Answer<penstock_node::ArrayReport> {
    api.look(move |instance| {
        let found = instance.node().find_arrays(Some(&id))?;
        Ok(instance.node().array_reports(&found[..1]).remove(0))
    })
    .await
}

/// `all` in a path means every array.
fn which(id: &str) -> Option<&str> {
    (id != "all").then_some(id)
}

#[derive(Serialize)]
struct Started {
    job: u64,
}

async fn array_rebuild(State(api): State<Api>, UrlPath(id): UrlPath<String>) -> Answer<Started> {
    api.look(move |instance| {
        let arrays = instance.node().find_arrays(which(&id))?;
        let job = async move {
            let mut debt = 0;
            for array in arrays {
                debt += array.wait_rebuilt().await;
            }
            Ok(json!({ "redundancy_debt_stripes": debt }))
        };
        Ok(Started { job: instance.start_job(format!("rebuild {id}"), job) })
    })
    .await
}

async fn array_scrub(State(api): State<Api>, UrlPath(id): UrlPath<String>) -> Answer<Started> {
    api.look(move |instance| {
        let arrays = instance.node().find_arrays(which(&id))?;
        let node = instance.node().clone();
        let job = async move {
            let mut summaries = Vec::new();
            for array in arrays {
                summaries.push(node.scrub(&array).await?);
            }
            Ok(json!(summaries))
        };
        Ok(Started { job: instance.start_job(format!("scrub {id}"), job) })
    })
    .await
}

async fn filesystems(State(api): State<Api>) -> Answer<Vec<penstock_node::FsReport>> {
    api.look(|instance| Ok(vec![instance.node().fs_report()])).await
}

fn known_fs(instance: &Instance, name: &str) -> Result<(), AdminError> {
    match instance.node().fs_report().name == name {
        true => Ok(()),
        false => Err(AdminError::NotFound(format!("no file system {name}; `penstock fs list` shows them"))),
    }
}

async fn filesystem(
    State(api): State<Api>,
    UrlPath(name): UrlPath<String>,
) -> Answer<penstock_node::FsReport> {
    api.look(move |instance| known_fs(instance, &name).map(|()| instance.node().fs_report())).await
}

#[derive(Default, Deserialize)]
struct CheckBody {
    #[serde(default)]
    repair: bool,
}

async fn fs_check(
    State(api): State<Api>,
    UrlPath(name): UrlPath<String>,
    body: Option<Json<CheckBody>>,
) -> Answer<Started> {
    let repair = body.is_some_and(|Json(body)| body.repair);
    api.look(move |instance| {
        known_fs(instance, &name)?;
        let checked = instance.clone();
        let job = async move { Ok(json!(checked.check_fs(repair).await?)) };
        let verb = if repair { "repair" } else { "check" };
        Ok(Started { job: instance.start_job(format!("{verb} {name}"), job) })
    })
    .await
}

async fn fs_damaged(
    State(api): State<Api>,
    UrlPath(name): UrlPath<String>,
) -> Answer<penstock_node::DamagedReport> {
    let look = move |instance: Rc<Instance>| async move {
        known_fs(&instance, &name)?;
        instance.node().damaged_fs().await
    };
    api.on_worker(look).await.map(Json)
}

async fn mounts(State(api): State<Api>) -> Answer<Vec<String>> {
    api.look(|instance| Ok(instance.status().mounts)).await
}

#[derive(Deserialize)]
struct MountBody {
    path: PathBuf,
}

async fn mount(State(api): State<Api>, Json(body): Json<MountBody>) -> Answer<Vec<String>> {
    let mount = move |instance: Rc<Instance>| async move {
        instance.mount(&body.path, &Default::default()).await?;
        Ok(instance.status().mounts)
    };
    api.on_worker(mount).await.map(Json)
}

async fn unmount(State(api): State<Api>) -> Answer<Vec<String>> {
    let unmount = |instance: Rc<Instance>| async move {
        instance.unmount(false).await?;
        Ok(instance.status().mounts)
    };
    api.on_worker(unmount).await.map(Json)
}

async fn job(State(api): State<Api>, UrlPath(id): UrlPath<u64>) -> Answer<Job> {
    api.look(move |instance| instance.job(id).ok_or_else(|| AdminError::NotFound(format!("no job {id}"))))
        .await
}

async fn down(State(api): State<Api>) -> Answer<Value> {
    api.look(|instance| {
        instance.stop();
        Ok(json!({ "stopping": true, "pid": std::process::id() }))
    })
    .await
}

async fn prometheus(State(api): State<Api>) -> Result<Response, Refusal> {
    let text = api.on_worker(|instance| async move {
        Ok(metrics::text(&instance.status(), &instance.node().fs_report(), &instance.latencies()))
    });
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text.await?).into_response())
}
