//! Draws the roofline of one core as SVG: the rates of the kernels below the ceilings of memory and ports.
//!
//! The horizontal axis is the number of products for each byte moved between memory and core, m k / (k + m).
//! A product is a byte of data times a coefficient, added to a parity strip. The vertical axis is products
//! per second. Both axes are logarithmic, so a bandwidth is a sloping line. It bends because writes are
//! slower than reads, which lowers the bandwidth of a code with more parity.

use super::cases::{Op, Warmth};
use std::fmt::Write;

/// The rates of one core and its ceilings.
#[derive(Clone, Debug)]
pub struct Roofline {
    kernel: &'static str,
    /// 10^9 products per second in L1.
    pub(super) products: f64,
    pub(super) columns: Vec<Column>,
}

/// The rates of one code in GB/s of data.
#[derive(Clone, Debug)]
pub(super) struct Column {
    k: usize,
    m: usize,
    warm_roof: Option<f64>,
    cold_roof: Option<f64>,
    rates: Vec<(Series, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Series {
    Warm,
    WarmChecked,
    Cold,
    ColdChecked,
    PeerWarm,
    PeerCold,
}

const SERIES: [(Series, &str, &str, bool); 6] = [
    (Series::Warm, "warm", "#1b6ca8", true),
    (Series::WarmChecked, "warm, with checksums", "#1b6ca8", false),
    (Series::Cold, "cold", "#c2410c", true),
    (Series::ColdChecked, "cold, with checksums", "#c2410c", false),
    (Series::PeerWarm, "ISA-L, warm", "#6b7280", true),
    (Series::PeerCold, "ISA-L, cold", "#6b7280", false),
];

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 690.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 480.0;

impl Roofline {
    pub(super) fn new(kernel: &'static str) -> Self {
        Self { kernel, products: 0.0, columns: Vec::new() }
    }
}

impl Column {
    pub(super) fn new(k: usize, m: usize) -> Self {
        Self { k, m, warm_roof: None, cold_roof: None, rates: Vec::new() }
    }

    pub(super) fn add(&mut self, op: Op, warmth: Warmth, rate: f64, ceiling: f64, peer: Option<f64>) {
        let (own, theirs) = match (op, warmth) {
            (Op::Encode, Warmth::Warm) => (Series::Warm, Some(Series::PeerWarm)),
            (Op::Encode, Warmth::Cold) => (Series::Cold, Some(Series::PeerCold)),
            (Op::EncodeChecked, Warmth::Warm) => (Series::WarmChecked, None),
            (Op::EncodeChecked, Warmth::Cold) => (Series::ColdChecked, None),
            _ => return,
        };
        match own {
            // The ceiling of a pass with checksums is L2 alone.
            Series::WarmChecked => self.warm_roof = Some(ceiling),
            Series::Cold => self.cold_roof = Some(ceiling),
            _ => {}
        }
        self.rates.push((own, rate));
        self.rates.extend(theirs.zip(peer));
    }

    fn intensity(&self) -> f64 {
        (self.m * self.k) as f64 / (self.k + self.m) as f64
    }

    fn products(&self, rate: f64) -> f64 {
        rate * self.m as f64
    }
}

/// Maps values of both axes to places in the picture.
struct Axes {
    across: [f64; 2],
    up: [f64; 2],
}

impl Axes {
    fn x(&self, value: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * (value / self.across[0]).ln() / (self.across[1] / self.across[0]).ln()
    }

    fn y(&self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * (value / self.up[0]).ln() / (self.up[1] / self.up[0]).ln()
    }
}

/// Returns the picture as SVG.
pub fn draw(roofline: &Roofline) -> String {
    let mut columns = roofline.columns.clone();
    columns.sort_by(|a, b| a.intensity().total_cmp(&b.intensity()));
    let values = columns.iter().flat_map(|column| {
        let roofs = column.warm_roof.into_iter().chain(column.cold_roof);
        roofs.chain(column.rates.iter().map(|(_, rate)| *rate)).map(|rate| column.products(rate))
    });
    let values: Vec<f64> = values.chain((roofline.products > 0.0).then_some(roofline.products)).collect();
    let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = values.iter().copied().fold(0.0, f64::max);
    let edge = |column: Option<&Column>| column.map_or(1.0, Column::intensity);
    let axes = Axes {
        across: [edge(columns.first()) * 0.9, edge(columns.last()) * 1.1],
        up: if values.is_empty() { [1.0, 100.0] } else { [lowest * 0.7, highest * 1.4] },
    };
    let mut svg = String::new();
    frame(&mut svg, roofline, &columns, &axes);
    roof(&mut svg, &axes, &columns, "L2", |column| column.warm_roof);
    roof(&mut svg, &axes, &columns, "memory", |column| column.cold_roof);
    let y = axes.y(roofline.products.max(axes.up[0]));
    line(&mut svg, [LEFT, y, RIGHT, y], "#374151", "6 3");
    text(&mut svg, [RIGHT + 6.0, y + 4.0], "start", "products in L1");
    for column in &columns {
        for (series, rate) in &column.rates {
            point(&mut svg, [axes.x(column.intensity()), axes.y(column.products(*rate))], *series);
        }
    }
    for (at, (series, name, ..)) in SERIES.iter().enumerate() {
        let y = 300.0 + 22.0 * at as f64;
        point(&mut svg, [RIGHT + 40.0, y], *series);
        text(&mut svg, [RIGHT + 52.0, y + 4.0], "start", name);
    }
    svg.push_str("</svg>\n");
    svg
}

fn frame(svg: &mut String, roofline: &Roofline, columns: &[Column], axes: &Axes) {
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    text(svg, [LEFT, 24.0], "start", &format!("Encoding on one core, kernel {}", roofline.kernel));
    text(svg, [LEFT, 42.0], "start", "10^9 products a second (GB/s of data times m)");
    line(svg, [LEFT, TOP, LEFT, BOTTOM], "#374151", "");
    line(svg, [LEFT, BOTTOM, RIGHT, BOTTOM], "#374151", "");
    for tick in [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0] {
        if (axes.up[0]..axes.up[1]).contains(&tick) {
            line(svg, [LEFT, axes.y(tick), RIGHT, axes.y(tick)], "#e5e7eb", "");
            text(svg, [LEFT - 6.0, axes.y(tick) + 4.0], "end", &tick.to_string());
        }
    }
    for (at, column) in columns.iter().enumerate() {
        let x = axes.x(column.intensity());
        line(svg, [x, TOP, x, BOTTOM], "#e5e7eb", "");
        // Neighbours are close, so every second name stands lower.
        let y = BOTTOM + if at % 2 == 0 { 18.0 } else { 34.0 };
        text(svg, [x, y], "middle", &format!("{}+{}", column.k, column.m));
    }
    let across = "products for each byte moved, m k / (k + m)";
    text(svg, [(LEFT + RIGHT) / 2.0, BOTTOM + 60.0], "middle", across);
}

fn roof(svg: &mut String, axes: &Axes, columns: &[Column], name: &str, of: impl Fn(&Column) -> Option<f64>) {
    let mut last: Option<[f64; 2]> = None;
    for column in columns {
        let Some(rate) = of(column) else { continue };
        let here = [axes.x(column.intensity()), axes.y(column.products(rate))];
        if let Some([x, y]) = last {
            line(svg, [x, y, here[0], here[1]], "#111827", "");
        }
        last = Some(here);
    }
    if let Some([x, y]) = last {
        text(svg, [x.max(RIGHT - 30.0) + 36.0, y + 4.0], "start", name);
    }
}

fn line(svg: &mut String, [x1, y1, x2, y2]: [f64; 4], colour: &str, dashes: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" \
         stroke-dasharray=\"{dashes}\"/>"
    );
}

fn text(svg: &mut String, [x, y]: [f64; 2], anchor: &str, words: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

fn point(svg: &mut String, [x, y]: [f64; 2], series: Series) {
    let (.., colour, filled) = SERIES.iter().find(|(of, ..)| *of == series).expect("every series is listed");
    let fill = if *filled { colour } else { "#ffffff" };
    let _ = writeln!(
        svg,
        "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"2\"/>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_every_point_and_is_whole() {
        let mut roofline = Roofline::new("portable");
        roofline.products = 100.0;
        let mut column = Column::new(4, 2);
        column.add(Op::Encode, Warmth::Warm, 60.0, 70.0, Some(20.0));
        column.add(Op::EncodeChecked, Warmth::Warm, 50.0, 70.0, None);
        column.add(Op::Encode, Warmth::Cold, 14.0, 15.0, None);
        roofline.columns = vec![column, Column::new(8, 2)];
        let svg = draw(&roofline);
        assert_eq!(svg.matches("<circle").count(), SERIES.len() + 4, "the legend and four points");
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(draw(&Roofline::new("portable")).ends_with("</svg>\n"), "nothing measured");
    }
}
