//! Tests of access control: other users, a stranger on a port of the service, and silent connections.

use crate::remote_mount::{OPTIONS, kill, up_alone};
use crate::store::{Store, can_mount, shell, wait_until};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const AS_NOBODY: [&str; 5] = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];

/// Starts the store without a mount, with both TCP listeners.
fn up_with_ports(store: &Store) {
    up_alone(store, &["--port", "0", "--tcp", "127.0.0.1:0"]);
}

fn address(store: &Store, name: &str) -> SocketAddr {
    let status = store.json(&["status"]);
    let text = status[name].as_str().unwrap();
    text.strip_prefix("http://").unwrap_or(text).parse().unwrap()
}

fn token(store: &Store, name: &str) -> String {
    std::fs::read_to_string(store.dir.join(name)).unwrap().trim().to_owned()
}

/// True if this machine allows the test to run commands as another user. Prints SKIPPED if not.
fn another_user(test: &str) -> bool {
    let can =
        Command::new("setpriv").args(AS_NOBODY).arg("true").status().is_ok_and(|status| status.success());
    if !can {
        eprintln!("SKIPPED {test}: another user needs root and setpriv");
    }
    can
}

fn mount_over_tcp(store: &Store, address: SocketAddr) -> Output {
    let mut mount = Store::program();
    mount.arg("mount").arg(&store.mount).args(["--tcp", &address.to_string()]);
    mount.arg("--token-file").arg(store.dir.join("token.data")).arg("--detach");
    mount.arg("--log").arg(store.home.join("mount.log"));
    mount.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn nothing_listens_on_tcp_unless_asked_for() {
    let store = Store::new("closed", &OPTIONS);
    up_alone(&store, &[]);
    let status = store.json(&["status"]);
    assert!(status["api_url"].is_null() && status["tcp_address"].is_null(), "{status}");
    let pid = status["pid"].as_u64().unwrap();
    let sockets = shell(&format!("readlink /proc/{pid}/fd/* | grep -o 'socket:.[0-9]*' | tr -dc '0-9\\n'"));
    assert!(sockets.lines().count() >= 2, "the doors of the folder: {sockets}");
    let over_tcp = ["tcp", "tcp6"].map(|kind| std::fs::read_to_string(format!("/proc/net/{kind}")).unwrap());
    let words = over_tcp.iter().flat_map(|table| table.split_whitespace());
    assert_eq!(words.filter(|word| sockets.lines().any(|socket| socket == *word)).count(), 0);
    for name in ["token", "token.data", "token.metrics"] {
        assert!(!store.dir.join(name).exists(), "{name} is made when it is needed");
    }
    let refused = store.run(&["--api", "http://127.0.0.1:1", "status"]);
    assert!(!refused.status.success());
    store.down();
    assert!(!store.dir.join("api.sock").exists() && !store.dir.join("data.sock").exists());
}

#[test]
fn another_user_comes_in_by_no_door() {
    let test = "another_user_comes_in_by_no_door";
    if !another_user(test) {
        return;
    }
    let store = Store::new("others", &OPTIONS);
    up_alone(&store, &[]);
    let program = std::env::temp_dir().join(format!("penstock-doors-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_penstock"), &program).unwrap();
    let mut status = Command::new("setpriv");
    status.args(AS_NOBODY).arg(&program).arg("--dir").arg(&store.dir).arg("status").stdin(Stdio::null());
    let said = String::from_utf8(status.output().unwrap().stderr).unwrap();
    assert!(said.contains("is another user's"), "{said}");
    // Access is refused even with open modes, as after a careless chmod -R, and to other programs.
    for name in ["api.sock", "data.sock"] {
        std::fs::set_permissions(store.dir.join(name), std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let asked = [
        vec![program.as_os_str().into(), "--dir".into(), store.dir.clone().into_os_string(), "status".into()],
        ["curl", "-sS", "--max-time", "20", "--unix-socket"]
            .map(Into::into)
            .into_iter()
            .chain([store.dir.join("api.sock").into_os_string(), "http://localhost/v1/status".into()])
            .collect::<Vec<_>>(),
    ];
    for words in &asked {
        let output =
            Command::new("setpriv").args(AS_NOBODY).args(words).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && !said.contains("health"), "{words:?}: {said}");
        let output = Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "root comes in: {}", String::from_utf8_lossy(&output.stderr));
    }
    std::fs::remove_file(program).unwrap();
    store.down();
}

/// Another process takes the ports of a killed service.
#[test]
fn who_takes_the_ports_of_a_killed_service_hears_no_token() {
    let test = "who_takes_the_ports_of_a_killed_service_hears_no_token";
    if !can_mount(test) {
        return;
    }
    let store = Store::new("thief", &OPTIONS);
    up_with_ports(&store);
    let (data, api) = (address(&store, "tcp_address"), address(&store, "api_url"));
    let said = mount_over_tcp(&store, data);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    std::fs::write(store.mount.join("file"), b"contents").unwrap();
    let by_folder = store.home.join("by-folder");
    store.ok(&["mount", by_folder.to_str().unwrap(), "--detach"]);
    assert_eq!(std::fs::read(by_folder.join("file")).unwrap(), b"contents");
    kill("-9", store.pid().unwrap());
    // The kernel frees a port a moment after its process is gone.
    let take = |address: SocketAddr| {
        let mut taken = None;
        wait_until("the port is free", || {
            taken = TcpListener::bind(address).ok();
            taken.is_some()
        });
        taken.unwrap()
    };
    let (thief, api_thief) = (take(data), take(api));
    api_thief.set_nonblocking(true).unwrap();
    // The mount over TCP reconnects and sends its greeting to the stranger.
    let (mut stream, _) = thief.accept().unwrap();
    let mut heard = vec![0; 44];
    stream.read_exact(&mut heard).unwrap();
    assert!(heard.starts_with(b"PNSG"));
    let mut answer = b"PNSC\x01\0\0\0".to_vec();
    answer.extend([0x5a; 16 + 32 + 32]);
    answer.extend(penstock_base::crc32c(&answer).to_le_bytes());
    stream.write_all(&answer).unwrap();
    stream.read_to_end(&mut heard).unwrap();
    assert_eq!(heard.len(), 44, "nothing follows an answer that proves nothing");
    assert!(!store.run(&["status"]).status.success());
    assert!(api_thief.accept().is_err(), "no command knocks at a port");
    let secret = token(&store, "token.data");
    assert!(!heard.windows(16).any(|part| secret.as_bytes().windows(16).any(|of| of == part)));
    drop((thief, api_thief, stream));
    // On the same port again, the mount reconnects and continues.
    up_alone(&store, &["--tcp", &data.to_string()]);
    std::fs::write(store.mount.join("again"), b"more").unwrap();
    assert_eq!(std::fs::read(by_folder.join("again")).unwrap(), b"more");
    for path in [&store.mount, &by_folder] {
        store.ok(&["umount", path.to_str().unwrap()]);
    }
    store.audit();
    store.down();
}

#[test]
fn the_silent_keep_nobody_out_and_the_metrics_token_opens_metrics_only() {
    let test = "the_silent_keep_nobody_out_and_the_metrics_token_opens_metrics_only";
    if !can_mount(test) {
        return;
    }
    let store = Store::new("silent", &OPTIONS);
    up_with_ports(&store);
    let (data, api) = (address(&store, "tcp_address"), address(&store, "api_url"));
    let mut silent: Vec<TcpStream> = Vec::new();
    for address in [data, api] {
        silent.extend((0..200).map(|_| TcpStream::connect(address).unwrap()));
    }
    // A header that arrives byte by byte counts as silence.
    for stream in silent.iter_mut().skip(200) {
        // The connection may have been closed already for a newer one.
        let _ = stream.write_all(b"GET /v1/sta");
    }
    let ask = |token: &str, path: &str| {
        let mut curl = Command::new("curl");
        curl.args(["-s", "--max-time", "60", "-o", "/dev/null", "-w", "%{http_code}", "-H"]);
        curl.arg(format!("Authorization: Bearer {token}")).arg(format!("http://{api}{path}"));
        String::from_utf8(curl.output().unwrap().stdout).unwrap()
    };
    let (all, metrics) = (token(&store, "token"), token(&store, "token.metrics"));
    assert_eq!((ask(&all, "/v1/status").as_str(), ask(&all, "/metrics").as_str()), ("200", "200"));
    assert_eq!((ask(&metrics, "/v1/status").as_str(), ask(&metrics, "/metrics").as_str()), ("401", "200"));
    assert_eq!(ask(&token(&store, "token.data"), "/metrics"), "401");
    assert!(store.ok(&["status"]).contains("health   ok"));
    let said = mount_over_tcp(&store, data);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    std::fs::write(store.mount.join("file"), b"contents").unwrap();
    let pid = store.pid().unwrap();
    let held = std::fs::read_dir(PathBuf::from(format!("/proc/{pid}/fd"))).unwrap().count();
    assert!(held < 400, "{held} descriptors for 400 connections that say nothing");
    // A silent connection is closed in the end.
    silent[399].set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut rest = Vec::new();
    let _ = silent[399].read_to_end(&mut rest);
    drop(silent);
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    store.audit();
    store.down();
}
