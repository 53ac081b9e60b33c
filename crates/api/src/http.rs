//! HTTP server of the REST API: routes, authentication, and the thread that serves it.
#![allow(clippy::disallowed_methods)]

use crate::error::ServerError;
use crate::instance::{Instance, Job, Task};
use crate::{metrics, openapi};
use axum::extract::{Path as UrlPath, Query, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use penstock_base::Newcomers;
use penstock_fabric::local::{self, Peer};
use penstock_fuse::MountOptions;
use penstock_node::AdminError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

/// Longest request body, in bytes.
const BODY_LIMIT_BYTES: usize = 64 << 10;
/// Longest request header, in bytes.
const HEADER_BYTES: usize = 64 << 10;
/// Time limit for a request header to arrive, and for silence between two requests on a connection.
const HEADER_PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for a request body to arrive.
const BODY_PATIENCE: Duration = Duration::from_secs(60);
/// Maximum number of admitted connections of each listener (folder socket and TCP).
const CONNECTIONS: usize = 64;
/// Maximum number of TCP connections that have not sent a valid token yet. One more closes the oldest of
/// them.
const NEWCOMERS: usize = 64;
/// Pause before each accept while half of [`NEWCOMERS`] or more have sent no valid token.
const CROWD_PAUSE: Duration = Duration::from_millis(1);
/// Pause after an accept failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// Path of the metrics. The metrics token opens this path only.
const METRICS: &str = "/metrics";

/// Tokens for the TCP listener. The socket in the folder needs none: the kernel reports the peer's user.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// Opens every path.
    pub administration: String,
    /// Opens `GET /metrics` only.
    pub metrics: String,
}

#[derive(Clone)]
struct Api {
    worker: UnboundedSender<Task>,
    tcp: Option<(SocketAddr, Tokens)>,
}

/// Listeners that are bound but not served yet: the socket in the folder, and TCP if a port was given.
pub struct Server {
    local: UnixListener,
    tcp: Option<(std::net::TcpListener, SocketAddr)>,
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
    /// Binds the socket in `dir`, whose lock the caller holds. Binds a loopback port too if `port` is given;
    /// 0 takes any free one.
    pub fn bind(dir: &Path, port: Option<u16>) -> Result<Self, ServerError> {
        let tcp = port.map(bind_tcp).transpose()?;
        let local = local::listen(dir, local::API).map_err(ServerError)?;
        local
            .set_nonblocking(true)
            .map_err(|error| ServerError(format!("the socket in the folder: {error}")))?;
        Ok(Self { local, tcp })
    }

    /// URL of the TCP listener. None without one.
    pub fn url(&self) -> Option<String> {
        self.tcp.as_ref().map(|(_, address)| format!("http://{address}"))
    }

    /// Serves on its own thread until the process ends. Requests over TCP need one of `tokens`. Calls
    /// `on_signal` for each SIGINT and SIGTERM.
    pub fn serve(
        self,
        tokens: Option<Tokens>,
        worker: UnboundedSender<Task>,
        on_signal: impl Fn() + Send + 'static,
    ) -> Result<(), ServerError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| ServerError(format!("no runtime for the API: {error}")))?;
        let address = self.tcp.as_ref().map(|(_, address)| *address);
        let router = router(Api { worker, tcp: address.zip(tokens) });
        let body = move || {
            runtime.block_on(async move {
                let signals = crate::signals::watch(on_signal);
                let local =
                    async { serve_local(tokio::net::UnixListener::from_std(self.local)?, &router).await };
                let tcp = async {
                    match self.tcp {
                        Some((listener, _)) => {
                            serve_tcp(tokio::net::TcpListener::from_std(listener)?, &router).await
                        }
                        None => std::future::pending().await,
                    }
                };
                let served: (io::Result<()>, io::Result<()>, ()) = tokio::join!(local, tcp, signals);
                for error in [served.0, served.1].into_iter().filter_map(Result::err) {
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

fn bind_tcp(port: u16) -> Result<(std::net::TcpListener, SocketAddr), ServerError> {
    let wanted = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let fail = |error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse => {
            ServerError(format!("port {port} is in use by another program: name another one with --port"))
        }
        _ => ServerError(format!("listening on {wanted}: {error}")),
    };
    let listener = std::net::TcpListener::bind(wanted).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    Ok((listener, address))
}

/// Accepts the next connection. An error, such as too many open files, may pass: accepting is retried after a
/// pause, because connections in the queue are not lost by it.
async fn next<C>(accept: impl AsyncFn() -> io::Result<C>) -> C {
    loop {
        match accept().await {
            Ok(connection) => return connection,
            Err(error) => {
                tracing::warn!(%error, "a connection to the API could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves the socket in the folder. Admits only this process's user and root. Beyond [`CONNECTIONS`] they
/// wait in the queue.
async fn serve_local(listener: tokio::net::UnixListener, router: &Router) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            unreachable!("the semaphore of the listener is never closed")
        };
        let (stream, _) = next(async || listener.accept().await).await;
        match Peer::of(&stream) {
            Ok(peer) if peer.may_enter() => {}
            Ok(peer) => {
                tracing::debug!(%peer, "a connection to the API is refused: it is another user's");
                continue;
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to the API is refused: the kernel does not report its user");
                continue;
            }
        }
        let served = connection(stream, router, Way::Folder);
        tokio::spawn(async move {
            served.await;
            drop(place);
        });
    }
}

/// Serves TCP. A connection that has not sent a valid token gives way to a newer one.
async fn serve_tcp(listener: tokio::net::TcpListener, router: &Router) -> io::Result<()> {
    let newcomers = Arc::new(Mutex::new(Newcomers::new(NEWCOMERS)));
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        if lock(&newcomers).len() >= NEWCOMERS / 2 {
            // Gives the connections at hand time to authenticate before newer ones displace them.
            tokio::time::sleep(CROWD_PAUSE).await;
        }
        let (stream, _) = next(async || listener.accept().await).await;
        let out = Arc::new(Notify::new());
        let (number, other) = lock(&newcomers).enter(out.clone());
        if let Some(other) = other {
            other.notify_one();
        }
        let entrant = Arc::new(Entrant {
            number,
            newcomers: newcomers.clone(),
            places: places.clone(),
            place: Mutex::default(),
        });
        let served = connection(stream, router, Way::Network(entrant));
        let newcomers = newcomers.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = served => {}
                () = out.notified() => tracing::debug!("a connection to the API without a token is closed for a newer one"),
            }
            lock(&newcomers).leave(number);
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("a panic aborts the process, so no lock is poisoned")
}

/// Serves one connection until it ends. It ends when a header is late, or after a long pause between
/// requests.
fn connection<S>(stream: S, router: &Router, way: Way) -> impl Future<Output = ()> + Send + use<S>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let router = TowerToHyperService::new(router.clone());
    let service = service_fn(move |mut request: axum::http::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(way.clone());
        router.call(request)
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER_PATIENCE).max_buf_size(HEADER_BYTES);
    let served = server.serve_connection(TokioIo::new(stream), service);
    async move {
        if let Err(error) = served.await {
            tracing::debug!(%error, "a connection to the API ended");
        }
    }
}

/// The listener that a request came through.
#[derive(Clone)]
enum Way {
    Folder,
    Network(Arc<Entrant>),
}

/// A connection over TCP. It counts as a newcomer until it sends a valid token.
struct Entrant {
    number: u64,
    newcomers: Arc<Mutex<Newcomers<Arc<Notify>>>>,
    places: Arc<Semaphore>,
    place: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Entrant {
    /// Called after a valid token. Returns false if all [`CONNECTIONS`] places are taken.
    fn enter(&self) -> bool {
        let mut place = lock(&self.place);
        if place.is_none() {
            *place = self.places.clone().try_acquire_owned().ok();
            if place.is_some() {
                lock(&self.newcomers).leave(self.number);
            }
        }
        place.is_some()
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
        .route("/v1/pools", get(pools))
        .route("/v1/pools/{name}", get(pool).post(pool_set))
        .route("/v1/stacks", get(stacks))
        .route("/v1/stacks/{number}", get(stack))
        .route("/v1/targets/{number}/files", get(target_files))
        .route("/v1/targets/{number}/forget", post(target_forget))
        .route("/v1/arrays", get(arrays))
        .route("/v1/arrays/{id}", get(array))
        .route("/v1/arrays/{id}/rebuild", post(array_rebuild))
        .route("/v1/arrays/{id}/scrub", post(array_scrub))
        .route("/v1/fs", get(filesystems))
        .route("/v1/fs/{name}", get(filesystem))
        .route("/v1/fs/{name}/check", post(fs_check))
        .route("/v1/fs/{name}/map-copies", post(fs_copy_map))
        .route("/v1/fs/{name}/damaged", get(fs_damaged))
        .route("/v1/fs/{name}/layout", get(fs_layout).post(fs_set_layout))
        .route("/v1/mounts", get(mounts).post(mount).delete(unmount))
        .route("/v1/sessions", get(sessions))
        .route("/v1/sessions/{id}", get(session))
        .route("/v1/sessions/{id}/end", post(session_end))
        .route("/v1/jobs/{id}", get(job))
        .route("/v1/down", post(down))
        .route(METRICS, get(prometheus))
        .fallback(|| async {
            Refusal(StatusCode::NOT_FOUND, "no such path; /v1/openapi.json lists them".into())
        })
        .layer(from_fn_with_state(api.clone(), admit))
        .with_state(api)
}

/// Admits a request: every one from the folder's socket; one over TCP if its Host and Origin name this
/// listener and its token opens the path.
async fn admit(
    State(api): State<Api>,
    Extension(way): Extension<Way>,
    request: Request,
    next: Next,
) -> Response {
    if let Way::Network(entrant) = way
        && let Err(refusal) = api.check(&request, &entrant)
    {
        return refusal.into_response();
    }
    // Reads the whole body before it answers. An answer to a request whose body is still arriving makes the
    // HTTP server close the connection under the client's next request.
    let (parts, body) = request.into_parts();
    match tokio::time::timeout(BODY_PATIENCE, axum::body::to_bytes(body, BODY_LIMIT_BYTES)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(parts, bytes.into())).await,
        Ok(Err(error)) => Refusal(StatusCode::BAD_REQUEST, format!("the body: {error}")).into_response(),
        Err(_) => {
            let why = format!("the body did not come within {} s", BODY_PATIENCE.as_secs());
            Refusal(StatusCode::REQUEST_TIMEOUT, why).into_response()
        }
    }
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some(sent) = sent.and_then(|value| value.strip_prefix("Bearer ")) else { return false };
    // Compares every byte, so that the time does not depend on the position of the first difference.
    let differ = sent.bytes().zip(token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b));
    sent.len() == token.len() && differ == 0
}

impl Api {
    /// Returns why a request over TCP is refused, if it is.
    fn check(&self, request: &Request, entrant: &Entrant) -> Result<(), Refusal> {
        let Some((address, tokens)) = &self.tcp else {
            return Err(Refusal(StatusCode::FORBIDDEN, "nothing is served over TCP".into()));
        };
        let headers = request.headers();
        let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let names = [address.to_string(), format!("localhost:{}", address.port())];
        let host_fits = text(header::HOST).is_some_and(|host| names.iter().any(|name| name == host));
        let origin_fits = text(header::ORIGIN)
            .is_none_or(|origin| names.iter().any(|name| format!("http://{name}") == origin));
        if !host_fits || !origin_fits {
            let why = "Host or Origin does not name this listener";
            return Err(Refusal(StatusCode::FORBIDDEN, why.into()));
        }
        let reads_metrics = request.method() == Method::GET && request.uri().path() == METRICS;
        let knows = has_token(headers, &tokens.administration)
            || (reads_metrics && has_token(headers, &tokens.metrics));
        if !knows {
            let why = "a token is needed: Authorization: Bearer followed by the contents of the file `token`; that of \
                       `token.metrics` opens /metrics";
            return Err(Refusal(StatusCode::UNAUTHORIZED, why.into()));
        }
        match entrant.enter() {
            true => Ok(()),
            false => {
                let why = format!("there are {CONNECTIONS} connections, which is the most");
                Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, why))
            }
        }
    }

    /// Runs `task` on the worker and returns its result. Fails with 503 while the instance is stopping.
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
                // The client may have disconnected.
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
    let replace = move |instance: Rc<Instance>| async move {
        instance.node().replace_drive(&id, path.as_deref()).await
    };
    api.on_worker(replace).await.map(Json)
}

async fn pools(State(api): State<Api>) -> Answer<Vec<penstock_node::PoolReport>> {
    api.look(|instance| Ok(instance.node().pool_reports())).await
}

async fn pool(State(api): State<Api>, UrlPath(name): UrlPath<String>) -> Answer<penstock_node::PoolReport> {
    api.look(move |instance| instance.node().show_pool(&name)).await
}

async fn pool_set(
    State(api): State<Api>,
    UrlPath(name): UrlPath<String>,
    Json(change): Json<penstock_node::PoolChange>,
) -> Answer<penstock_node::PoolReport> {
    let set = move |instance: Rc<Instance>| async move { instance.node().set_pool(&name, change).await };
    api.on_worker(set).await.map(Json)
}

async fn stacks(State(api): State<Api>) -> Answer<Vec<penstock_node::StackReport>> {
    api.look(|instance| Ok(instance.node().stack_reports())).await
}

async fn stack(State(api): State<Api>, UrlPath(number): UrlPath<u16>) -> Answer<penstock_node::StackReport> {
    api.look(move |instance| instance.node().show_stack(number)).await
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

/// Returns None, for every array, if `id` is `all`.
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

async fn sessions(State(api): State<Api>) -> Answer<Vec<penstock_node::SessionDetails>> {
    api.look(|instance| Ok(instance.node().session_details())).await
}

async fn session(State(api): State<Api>, UrlPath(id): UrlPath<u64>) -> Answer<penstock_node::SessionDetails> {
    api.look(move |instance| instance.node().show_session(id)).await
}

async fn session_end(
    State(api): State<Api>,
    UrlPath(id): UrlPath<u64>,
) -> Answer<penstock_node::SessionDetails> {
    api.on_worker(move |instance| async move { instance.node().end_session(id).await }).await.map(Json)
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

async fn fs_copy_map(State(api): State<Api>, UrlPath(name): UrlPath<String>) -> Answer<Started> {
    api.look(move |instance| {
        known_fs(instance, &name)?;
        let copied = instance.clone();
        let job = async move { Ok(json!(copied.node().copy_maps().await?)) };
        Ok(Started { job: instance.start_job(format!("copy the map of {name}"), job) })
    })
    .await
}

#[derive(Deserialize)]
struct AtPath {
    path: String,
}

async fn fs_layout(
    State(api): State<Api>,
    UrlPath(name): UrlPath<String>,
    Query(AtPath { path }): Query<AtPath>,
) -> Answer<penstock_node::LayoutReport> {
    let look = move |instance: Rc<Instance>| async move {
        known_fs(&instance, &name)?;
        instance.node().layout(&path).await
    };
    api.on_worker(look).await.map(Json)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutBody {
    path: String,
    count: Option<u16>,
    turn: Option<u16>,
}

async fn fs_set_layout(
    State(api): State<Api>,
    UrlPath(name): UrlPath<String>,
    Json(LayoutBody { path, count, turn }): Json<LayoutBody>,
) -> Answer<penstock_node::LayoutReport> {
    let set = move |instance: Rc<Instance>| async move {
        known_fs(&instance, &name)?;
        instance.node().set_layout(&path, penstock_node::WantedLayout { count, turn }).await
    };
    api.on_worker(set).await.map(Json)
}

async fn target_files(
    State(api): State<Api>,
    UrlPath(number): UrlPath<u32>,
) -> Answer<penstock_node::TargetFilesReport> {
    api.on_worker(move |instance| async move { instance.node().files_on(number).await }).await.map(Json)
}

async fn target_forget(
    State(api): State<Api>,
    UrlPath(number): UrlPath<u32>,
) -> Answer<penstock_node::TargetFilesReport> {
    api.on_worker(move |instance| async move { instance.node().forget_target(number).await }).await.map(Json)
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
        if !body.path.is_absolute() {
            let path = body.path.display();
            return Err(AdminError::Refused(format!(
                "{path} is not an absolute path, and this process does not know the caller's directory"
            )));
        }
        let options = MountOptions { guarded: true, ..MountOptions::default() };
        instance.mount(&body.path, &options).await?;
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
    api.look(move |instance| instance.job(id)).await
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
